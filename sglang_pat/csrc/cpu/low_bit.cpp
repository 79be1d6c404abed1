// Packs and unpacks pages of KV in few bits. sglang_pat/kernels/low_bit.py is its one caller.
#include "low_bit.h"

#include <tvm/ffi/function.h>

#include "../arguments.h"

namespace {

using tvm::ffi::TensorView;

pat::LowBit check(const TensorView& k, const TensorView& v, const TensorView& records, int64_t bits) {
  pat::check(k, "k", 4, pat::kFloat32, kDLCPU);
  pat::check(v, "v", 4, pat::kFloat32, kDLCPU);
  pat::check(records, "records", 3, DLDataType{kDLUInt, 8, 1}, kDLCPU);
  TVM_FFI_CHECK(bits == 4 || bits == 2, ValueError) << "KV is kept in 4 or 2 bits, not " << bits;
  const pat::LowBit form{int(bits), int(k.size(3))};
  TVM_FFI_CHECK(k.size(1) == pat::kPageTokens && k.size(3) > 0 && k.size(3) % 128 == 0, ValueError)
      << "a page has 64 tokens of heads of a multiple of 128, not " << k.size(1) << " of " << k.size(3);
  bool same = true;
  for (int i = 0; i < 4; ++i) same = same && k.size(i) == v.size(i);
  TVM_FFI_CHECK(same && k.size(0) == records.size(0) && k.size(2) == records.size(1) && records.size(2) == form.bytes() &&
                    k.is_contiguous() && v.is_contiguous() && records.is_contiguous(),
                ValueError)
      << "k, v and records of " << form.bytes() << " bytes must be contiguous, and fit each other";
  return form;
}

template <typename Run>
void each_record(const TensorView& records, const Run& run) {
#pragma omp parallel for
  for (int64_t i = 0; i < records.size(0) * records.size(1); ++i)
    run(i, static_cast<uint8_t*>(records.data_ptr()) + i * records.size(2));
}

// Where a record's first token is.
int64_t first(const TensorView& k, int64_t record) {
  const int64_t heads = k.size(2);
  return (record / heads * pat::kPageTokens * heads + record % heads) * k.size(3);
}

void pack_pages(TensorView k, TensorView v, TensorView records, int64_t bits) {
  const pat::LowBit form = check(k, v, records, bits);
  const float *keys = static_cast<const float*>(k.data_ptr()), *values = static_cast<const float*>(v.data_ptr());
  each_record(records, [&](int64_t i, uint8_t* record) {
    pat::pack_page(form, keys + first(k, i), values + first(k, i), k.size(2) * form.dim, record);
  });
}

void unpack_pages(TensorView records, TensorView k, TensorView v, int64_t bits) {
  const pat::LowBit form = check(k, v, records, bits);
  each_record(records, [&](int64_t i, uint8_t* record) {
    for (int token = 0; token < pat::kPageTokens; ++token) {
      const int64_t at = first(k, i) + token * k.size(2) * form.dim;
      pat::unpack_row(form, record, token, false, static_cast<float*>(k.data_ptr()) + at);
      pat::unpack_row(form, record, token, true, static_cast<float*>(v.data_ptr()) + at);
    }
  });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack_pages, pack_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unpack_pages, unpack_pages);
