// Packs, unpacks and stores pages of KV in 4 or 2 bits on the CPU; low_bit.h has the layout. sglang_pat/kernels/low_bit.py
// is its one caller.
#include "../error.h"  // before what throws

#include "low_bit.h"

#include <tvm/ffi/function.h>

#include "../arguments.h"

namespace {

using tvm::ffi::TensorView;

pat::LowBit form_of(const TensorView& pages, const TensorView& k, const TensorView& v, int64_t bits) {
  pat::check(pages, "pages", 3, pat::kUint8, pat::kCpu);
  const int64_t heads = k.size(k.ndim() - 2), dim = k.size(k.ndim() - 1);
  TVM_FFI_CHECK(pat::LowBit::exists(bits, dim), ValueError)
      << "KV is kept in 4 or 2 bits, and heads have a multiple of 32 dimensions up to 256, not " << bits << " and " << dim;
  const pat::LowBit form{int(bits), int(dim)};
  bool same = k.ndim() == v.ndim();
  for (int i = 0; same && i < k.ndim(); ++i) same = k.size(i) == v.size(i);
  TVM_FFI_CHECK(same && pages.size(1) == heads && pages.size(2) == form.bytes() && pages.is_contiguous(), ValueError)
      << "k, v and pages of " << form.bytes() << " bytes must fit each other";
  return form;
}

pat::LowBit check(const TensorView& k, const TensorView& v, const TensorView& pages, int64_t bits) {
  pat::check(k, "k", 4, pat::kFloat32, pat::kCpu);
  pat::check(v, "v", 4, pat::kFloat32, pat::kCpu);
  const pat::LowBit form = form_of(pages, k, v, bits);
  TVM_FFI_CHECK(k.size(1) == pat::kPageTokens && k.size(0) == pages.size(0) && k.is_contiguous() && v.is_contiguous(),
                ValueError)
      << "a page has 64 tokens, not " << k.size(1) << "; k and v must be contiguous, and of so many pages";
  return form;
}

template <typename Run>
void each_record(const TensorView& pages, const Run& run) {
#pragma omp parallel for
  for (int64_t i = 0; i < pages.size(0) * pages.size(1); ++i)
    run(i, static_cast<uint8_t*>(pages.data_ptr()) + i * pages.size(2));
}

// Offset in K and V of a record's first token.
int64_t first(const TensorView& k, int64_t record) {
  const int64_t heads = k.size(2);
  return (record / heads * pat::kPageTokens * heads + record % heads) * k.size(3);
}

void pack_pages(TensorView k, TensorView v, TensorView pages, int64_t bits) {
  const pat::LowBit form = check(k, v, pages, bits);
  const float *keys = static_cast<const float*>(k.data_ptr()), *values = static_cast<const float*>(v.data_ptr());
  each_record(pages, [&](int64_t i, uint8_t* record) {
    pat::pack_page(form, keys + first(k, i), values + first(k, i), k.size(2) * form.dim, record);
  });
}

void unpack_pages(TensorView pages, TensorView k, TensorView v, int64_t bits) {
  const pat::LowBit form = check(k, v, pages, bits);
  each_record(pages, [&](int64_t i, uint8_t* record) {
    pat::PageReader reader(form);
    for (int token = 0; token < pat::kPageTokens; ++token) {
      const int64_t at = first(k, i) + token * k.size(2) * form.dim;
      reader.k(record, token, static_cast<float*>(k.data_ptr()) + at);
      reader.v(record, token, static_cast<float*>(v.data_ptr()) + at);
    }
  });
}

// Stores new tokens of one KV head, in order: each into its request's unfinished page, which is packed into its record when
// it is full. Page 0 is SGLang's for padding: its tokens are skipped.
template <typename T>
void store_head(const pat::LowBit& form, const TensorView& k, const TensorView& v, const TensorView& pages,
                const TensorView& tail_k, const TensorView& tail_v, const int64_t* rows, const int64_t* seq_lens,
                const int64_t* slots, int64_t head) {
  const int d = form.dim;
  float full[2][pat::kPageTokens * pat::LowBit::kMostDim];  // K and V of a page
  const TensorView *from[2] = {&k, &v}, *tails[2] = {&tail_k, &tail_v};
  for (int64_t i = 0; i < k.size(0); ++i) {
    if (slots[i] < pat::kPageTokens) continue;
    const int64_t index_in_page = (seq_lens[i] - 1) % pat::kPageTokens;
    const bool is_full = index_in_page == pat::kPageTokens - 1;
    for (int which : {0, 1}) {
      const TensorView &one = *from[which], &tail = *tails[which];
      T* const page = static_cast<T*>(tail.data_ptr()) + rows[i] * tail.stride(0) + head * tail.stride(2);
      const T* const token = static_cast<const T*>(one.data_ptr()) + i * one.stride(0) + head * one.stride(1);
      std::copy_n(token, d, page + index_in_page * tail.stride(1));
      for (int t = 0; is_full && t < pat::kPageTokens; ++t) pat::convert(page + t * tail.stride(1), full[which] + t * d, d);
    }
    if (!is_full) continue;
    uint8_t* const record = static_cast<uint8_t*>(pages.data_ptr()) + slots[i] / pat::kPageTokens * pages.stride(0);
    pat::pack_page(form, full[0], full[1], d, record + head * pages.stride(1));
  }
}

template <typename T>
void store(const pat::LowBit& form, const TensorView& k, const TensorView& v, const TensorView& pages,
           const TensorView& tail_k, const TensorView& tail_v, const int64_t* rows, const int64_t* seq_lens,
           const int64_t* slots) {
#pragma omp parallel for
  for (int64_t head = 0; head < k.size(1); ++head)
    store_head<T>(form, k, v, pages, tail_k, tail_v, rows, seq_lens, slots, head);
}

void store_tokens(TensorView k, TensorView v, TensorView pages, TensorView tail_k, TensorView tail_v, TensorView rows,
                  TensorView seq_lens, TensorView slots, int64_t bits) {
  pat::check(k, "k", 3, k.dtype(), pat::kCpu);
  pat::check(v, "v", 3, k.dtype(), pat::kCpu);
  pat::check(tail_k, "tail_k", 4, k.dtype(), pat::kCpu);
  pat::check(tail_v, "tail_v", 4, k.dtype(), pat::kCpu);
  pat::check(rows, "rows", 1, pat::kInt64, pat::kCpu);
  pat::check(seq_lens, "seq_lens", 1, pat::kInt64, pat::kCpu);
  pat::check(slots, "slots", 1, pat::kInt64, pat::kCpu);
  const pat::LowBit form = form_of(pages, k, v, bits);
  bool same = true;
  for (const TensorView& tail : {tail_k, tail_v})
    same = same && tail.size(0) == tail_k.size(0) && tail.size(1) == pat::kPageTokens && tail.size(2) == k.size(1) &&
           tail.size(3) == k.size(2);
  TVM_FFI_CHECK(same, ValueError) << "tails must be 64 tokens of k's heads for each row";
  const int64_t tokens = k.size(0);
  TVM_FFI_CHECK(rows.size(0) == tokens && seq_lens.size(0) == tokens && slots.size(0) == tokens, ValueError)
      << "rows, seq_lens and slots must be the new tokens'";
  const auto *row = static_cast<const int64_t*>(rows.data_ptr()),
             *length = static_cast<const int64_t*>(seq_lens.data_ptr()),
             *slot = static_cast<const int64_t*>(slots.data_ptr());
  bool good = true;
  for (int64_t i = 0; i < tokens; ++i)
    good = good && row[i] >= 0 && row[i] < tail_k.size(0) && length[i] > 0 && slot[i] >= 0 &&
           slot[i] < pages.size(0) * pat::kPageTokens;
  TVM_FFI_CHECK(good, ValueError) << "a new token has a row, a length or a slot that there is not";
  const DLDataType type = k.dtype();
  if (type.code == kDLFloat && type.bits == 32) return store<float>(form, k, v, pages, tail_k, tail_v, row, length, slot);
  if (type.code == kDLFloat && type.bits == 16)
    return store<pat::Fp16>(form, k, v, pages, tail_k, tail_v, row, length, slot);
  if (type.code == kDLBfloat && type.bits == 16)
    return store<pat::Bf16>(form, k, v, pages, tail_k, tail_v, row, length, slot);
  TVM_FFI_THROW(ValueError) << "new tokens must be float32, float16 or bfloat16";
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack_pages, pack_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unpack_pages, unpack_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_tokens, store_tokens);
