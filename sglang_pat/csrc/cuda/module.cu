// The native module of one `Variant`, but for its kernels (kernels.cuh): checks the tensors that kernels/cuda.py passes, fills `Params`, chooses grids, and
// launches forward, merge, and with pages of few bits the stores and unpacking.
#include "../error.h"  // before what throws

#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include <iterator>
#include <limits>

#include "../arguments.h"
#include "kernels.cuh"

namespace {

using pat::Variant;
using tvm::ffi::TensorView;
using namespace pat::kernels;

// As Q is.
const DLDataType kHalf{uint8_t(std::is_same_v<Element, __half> ? kDLFloat : kDLBfloat), 16, 1};

// Whether 16-byte copies can begin where the tensor does.
bool is_aligned(const TensorView& tensor) { return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % pat::kCopyBytes == 0; }

// Checks the records of pages of 4 or 2 bits; other formats have none.
void check_records(const TensorView& records, int64_t kv_heads, DLDevice gpu) {
  pat::check(records, "records", 3, pat::kUint8, gpu);
  TVM_FFI_CHECK(Format::kRecordBytes > 0 || records.size(0) == 0, ValueError)
      << "this kernel reads KV from k and v, and no records";
  TVM_FFI_CHECK(Format::kRecordBytes == 0 || (records.size(1) == kv_heads && records.size(2) == Format::kRecordBytes &&
                                              records.is_contiguous() && is_aligned(records)),
                ValueError)
      << "records must be contiguous, of " << kv_heads << " KV heads with " << Format::kRecordBytes << " bytes each";
}

void check(cudaError_t error) { TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << cudaGetErrorString(error); }

// Checks a tensor whose rows of `dim` elements are read by 16-byte copies.
void check_rows(const TensorView& tensor, const char* name, int dim, DLDataType dtype, DLDevice gpu) {
  pat::check(tensor, name, 3, dtype, gpu);
  TVM_FFI_CHECK(tensor.size(2) == dim, ValueError) << name << " must have heads of " << dim;
  const int elements = pat::kCopyBytes * 8 / dtype.bits;
  TVM_FFI_CHECK(tensor.stride(0) % elements == 0 && tensor.stride(1) % elements == 0 && is_aligned(tensor), ValueError)
      << name << "'s heads must begin at multiples of 16 bytes";
}

// Checks a KV pool. The kernels keep its strides, and the offsets of heads in a slot, in 32 bits.
void check_pool(const TensorView& tensor, const char* name, int dim, DLDataType dtype, DLDevice gpu) {
  check_rows(tensor, name, dim, dtype, gpu);
  for (const int64_t stride : {tensor.stride(0), tensor.stride(1)})
    TVM_FFI_CHECK(stride >= 0 && stride <= std::numeric_limits<uint32_t>::max() / kKvBytes, ValueError)
        << name << "'s slots and heads must be less than 4 GiB apart";
  TVM_FFI_CHECK(
      std::max<int64_t>(tensor.size(1) - 1, 0) * tensor.stride(1) <= std::numeric_limits<uint32_t>::max() / kKvBytes,
      ValueError)
      << name << "'s heads must all be within 4 GiB";
}

// CTAs of each kernel that a device runs at once.
struct Resident {
  int forward, merge_by_cta, merge_by_warp;
};

template <typename Kernel>
int resident_ctas(Kernel kernel, int threads, size_t shared, int sms) {
  int ctas;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, threads, shared));
  return ctas * sms;
}

const Resident& resident(int64_t id) {
  static Resident known[64] = {};
  TVM_FFI_CHECK(id >= 0 && id < int64_t(std::size(known)), ValueError) << "there is no GPU " << id;
  Resident& all = known[id];
  if (all.forward == 0) {
    tvm::ffi::CUDADeviceGuard guard{int(id)};
    int sms;
    check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, int(id)));
    check(cudaFuncSetAttribute(kForward, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory)));
    all.merge_by_cta = resident_ctas(kMergeByCta, pat::kMergeThreads, 0, sms);
    all.merge_by_warp = resident_ctas(kMergeByWarp, pat::kMergeThreads, 0, sms);
    all.forward = resident_ctas(kForward, Format::kThreads, sizeof(Memory), sms);
    TVM_FFI_CHECK(all.forward > 0, RuntimeError)
        << "this GPU has less shared memory than the " << sizeof(Memory) << " bytes that these tiles need";
  }
  return all;
}

// The forward kernel's fixed grid.
int64_t workers(int64_t id) { return resident(id).forward; }

template <typename Kernel, typename KernelParams>
void launch(Kernel kernel, int grid, int block, size_t shared, cudaStream_t stream, bool dependent,
            const KernelParams& params) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent;
  check(cudaLaunchKernelEx(&config, kernel, params));
}

// `tile_rows` are those of the largest tile that plans are made with.
pat::Params make_params(const TensorView& q, const TensorView& out, const pat::Plan& plan, const pat::KvView& kv,
                        const pat::Tables& tables, const pat::Scores& scores, int64_t window, int64_t tile_rows,
                        const TensorView& q_rope) {
  const DLDevice gpu = pat::gpu_of(q);
  const bool whole_q = !Variant::kLatent || q.size(2) == Variant::kDim;
  check_rows(q, "q", whole_q ? Variant::kDim : Variant::kVDim, kHalf, gpu);
  const DLDataType element = Kv::kBytes == 1 ? pat::kUint8 : kHalf;
  check_pool(kv.k, "k", Variant::kDim, element, gpu);
  check_pool(kv.v, "v", Variant::kVDim, element, gpu);
  TVM_FFI_CHECK(kv.k.size(0) == kv.v.size(0) && kv.k.size(1) == kv.v.size(1), ValueError)
      << "k and v must have the same slots and heads";
  TVM_FFI_CHECK(!Variant::kLatent || (kv.k.data_ptr() == kv.v.data_ptr() && kv.k.stride(0) == kv.v.stride(0) &&
                                      kv.k.stride(1) == kv.v.stride(1)),
                ValueError)
      << "v must be the first columns of k";
  check_rows(out, "out", Variant::kVDim, kHalf, gpu);
  pat::check(plan, tables, q, kv.k, out, DLDataType{kDLFloat, 16, 1}, gpu);
  TVM_FFI_CHECK(plan.partial.size(2) == Variant::kVDim, ValueError) << "partial must have heads of " << Variant::kVDim;
  TVM_FFI_CHECK(is_aligned(plan.partial), ValueError) << "partial must be aligned to 16 bytes";
  pat::check_sinks(scores.sinks, DLDataType{kDLBfloat, 16, 1}, q.size(1), gpu);
  TVM_FFI_CHECK((scores.sinks.size(0) > 0) == Variant::kSinks, ValueError)
      << scores.sinks.size(0) << " sinks for " << q.size(1) << " query heads, and a kernel "
      << (Variant::kSinks ? "with" : "without") << " sinks";
  pat::Params p;
  p.q = q.data_ptr(), p.k = kv.k.data_ptr(), p.v = kv.v.data_ptr(), p.out = out.data_ptr();
  p.partial = static_cast<__half*>(plan.partial.data_ptr()), p.lse2 = static_cast<float*>(plan.lse.data_ptr());
  p.req_to_token = static_cast<const int32_t*>(tables.req_to_token.data_ptr());
  p.rows = static_cast<const int64_t*>(tables.rows.data_ptr());
  p.seq_lens = static_cast<const int64_t*>(tables.seq_lens.data_ptr());
  p.plan = static_cast<const int32_t*>(plan.ints.data_ptr());
  // A small batch's plan has some KB, a large one's up to 128 bytes for each query
  // (benchmarks/notes/code-placement.md, "Where code lies in memory").
  constexpr int64_t kFewLines = 64;
  const auto ceil_div = [](auto a, decltype(a) b) { return (a + b - 1) / b; };
  const auto lines = [&](int64_t count, int64_t bytes) { return ceil_div(count * bytes, pat::kLineBytes); };
  p.plan_lines = int(std::min(lines(plan.ints.size(0), sizeof(int32_t)), kFewLines + out.size(0)));
  p.length_lines = int(lines(std::min(tables.rows.size(0), tables.seq_lens.size(0)), sizeof(int64_t)));
  p.sinks = static_cast<const __nv_bfloat16*>(scores.sinks.data_ptr());
  p.q_token = q.stride(0), p.q_head = q.stride(1);
  p.q_rope = static_cast<const Element*>(p.q) + Variant::kVDim, p.rope_token = p.q_token, p.rope_head = p.q_head;
  // Empty where none is given.
  TVM_FFI_CHECK(!whole_q || q_rope.size(0) == 0, ValueError)
      << "q_rope is for latents' q without these columns, and this q has " << q.size(2) << " of " << Variant::kDim;
  if (!whole_q) {
    check_rows(q_rope, "q_rope", Variant::kDim - Variant::kVDim, kHalf, gpu);
    TVM_FFI_CHECK(q_rope.size(0) == q.size(0) && q_rope.size(1) == q.size(1), ValueError)
        << "q and q_rope must have the same tokens and heads";
    p.q_rope = q_rope.data_ptr(), p.rope_token = q_rope.stride(0), p.rope_head = q_rope.stride(1);
  }
  p.k_slot = uint32_t(kv.k.stride(0) * kKvBytes), p.k_head = uint32_t(kv.k.stride(1) * kKvBytes);
  p.v_slot = uint32_t(kv.v.stride(0) * kKvBytes), p.v_head = uint32_t(kv.v.stride(1) * kKvBytes);
  p.table_row = tables.req_to_token.stride(0);
  TVM_FFI_CHECK(tile_rows > 0 && tile_rows <= 192, ValueError) << "there is no tile of " << tile_rows << " rows";
  const int kv_heads = int(kv.k.size(1));
  TVM_FFI_CHECK(kv_heads <= pat::kMostKvHeads, ValueError)
      << "there are " << kv_heads << " KV heads, too many for a work item";
  check_records(kv.records, kv_heads, gpu);
  p.records = static_cast<const uint8_t*>(kv.records.data_ptr());
  p.page_bytes = uint32_t(kv_heads * Format::kRecordBytes);
  TVM_FFI_CHECK(!pat::kIsPages<Kv> || kv.k.size(0) >= tables.req_to_token.size(0) * pat::kTokens, ValueError)
      << "k and v must have a tail of " << pat::kTokens << " tokens for each row of req_to_token";
  pat::check(tables.masks, "masks", 2, pat::kInt64, gpu);
  p.masks = static_cast<const uint64_t*>(tables.masks.data_ptr());
  p.draft = int(tables.masks.size(1));
  TVM_FFI_CHECK((p.draft > 0) == Variant::kMasks, ValueError)
      << "drafts of " << p.draft << " tokens, and a kernel " << (Variant::kMasks ? "with" : "without") << " masks";
  TVM_FFI_CHECK(p.draft <= pat::kMostDraft, ValueError) << "a draft may have 64 tokens, not " << p.draft;
  const int tokens = Variant::kMasks ? p.draft : 1;
  TVM_FFI_CHECK(out.size(0) % tokens == 0, ValueError) << out.size(0) << " tokens are no whole drafts of " << tokens;
  p.queries = int(out.size(0)) / tokens, p.token_heads = int(q.size(1)), p.heads = tokens * p.token_heads;
  p.token_group = p.token_heads / kv_heads, p.kv_group = tokens * p.token_group;
  TVM_FFI_CHECK(out.size(1) == p.token_heads && q.size(0) >= out.size(0), ValueError)
      << "q must have the heads of out, and a row for each of its";
  TVM_FFI_CHECK(plan.partial.size(1) == p.heads && plan.lse.size(1) == p.heads, ValueError)
      << "partial and lse must have the " << p.heads << " heads of a query";
  TVM_FFI_CHECK(!Variant::kMasks || (tables.masks.is_contiguous() && tables.masks.size(0) >= p.queries), ValueError)
      << "masks must be contiguous, and of all drafts";
  TVM_FFI_CHECK(window >= 0 && window <= (Variant::kLimits ? pat::kNoWindow : 0), ValueError)
      << "a window of " << window << ", and a kernel " << (Variant::kLimits ? "with" : "without") << " limits";
  p.window = window > 0 ? int(window) : pat::kNoWindow;
  p.splits = ceil_div(p.kv_group, int(tile_rows)), p.group = ceil_div(p.kv_group, p.splits), p.runs = kv_heads * p.splits;
  p.row_slices = Variant::kLatent ? 1 : ceil_div(p.group, pat::kNarrowM);  // tiles of latents hold whole queries
  p.group_inverse = uint32_t((65536 + p.group - 1) / p.group);
  constexpr double kLog2E = 1.4426950408889634;
  p.scale_log2 = float(scores.scale * kLog2E);
  p.v_scale = float(kv.v_scale);
  TVM_FFI_CHECK((scores.logit_cap > 0) == Variant::kCaps, ValueError)
      << "a logit cap of " << scores.logit_cap << ", and a kernel " << (Variant::kCaps ? "that caps" : "that does not cap")
      << " scores";
  // The kernel caps scores before it scales them.
  p.cap = float(scores.logit_cap / scores.scale);
  p.cap_exponent = scores.logit_cap > 0 ? float(2 * kLog2E * scores.scale / scores.logit_cap) : 0;
  return p;
}

// Launches forward and, if asked for, merge on the current stream. The merge kernels add up parts in other orders, and which
// one is fastest depends on the batch; with kBatchInvariant it is the same one for all.
void decode(TensorView q, TensorView out, TensorView plan, TensorView partial, TensorView lse, TensorView k, TensorView v,
            TensorView records, double v_scale, TensorView req_to_token, TensorView rows, TensorView seq_lens,
            TensorView masks, double scale, double logit_cap, TensorView sinks, int64_t window, int64_t tile_rows,
            bool with_merge, bool overlap, bool early, TensorView q_rope) {
  tvm::ffi::CUDADeviceGuard guard(q.device().device_id);
  pat::Params p = make_params(q, out, {plan, partial, lse}, {k, v, records, v_scale}, {req_to_token, rows, seq_lens, masks},
                              {scale, logit_cap, sinks}, window, tile_rows, q_rope);
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, q.device().device_id));
  const Resident& ctas = resident(q.device().device_id);
  launch(kForward, ctas.forward, Format::kThreads, sizeof(Memory), stream, early, p);
  const int64_t outputs = int64_t(p.queries) * p.heads;
  if (!with_merge || outputs == 0) return;
  const auto ctas_for = [](int64_t warps) { return int((warps + pat::kMergeWarps - 1) / pat::kMergeWarps); };
  if (outputs <= ctas.merge_by_cta && !Variant::kBatchInvariant)
    launch(kMergeByCta, int(outputs), pat::kMergeThreads, 0, stream, overlap, p);
  else if (Variant::kBatchInvariant || ctas_for(outputs) <= ctas.merge_by_warp || p.heads % kMergeRows != 0)
    launch(kMergeByWarp, ctas_for(outputs), pat::kMergeThreads, 0, stream, overlap, p);
  else
    launch(kMergeSeveral, ctas_for(outputs / kMergeRows), pat::kMergeThreads, 0, stream, overlap, p);
}

void check_pages() { TVM_FFI_CHECK(pat::kIsPages<Kv>, ValueError) << "this module's KV is not in pages of few bits"; }

// Stores new tokens in their rows' tails, and full pages in their records, on the current stream. The GPU checks indices:
// a token with one that does not exist is skipped.
template <typename Kv>
void store(TensorView k, TensorView v, TensorView records, TensorView tail_k, TensorView tail_v, TensorView rows,
           TensorView seq_lens, TensorView slots) {
  check_pages();
  const DLDevice gpu = pat::gpu_of(k);
  const std::pair<const TensorView*, const char*> news[] = {{&k, "k"}, {&v, "v"}};
  for (const auto& [tensor, name] : news) {
    pat::check(*tensor, name, 3, kHalf, gpu);
    TVM_FFI_CHECK(tensor->size(2) == Variant::kDim && tensor->size(0) == k.size(0) && tensor->size(1) == k.size(1),
                  ValueError)
        << "k and v must be the same tokens', with heads of " << Variant::kDim;
  }
  const int64_t tokens = k.size(0), heads = k.size(1);
  check_records(records, heads, gpu);
  for (const TensorView* tail : {&tail_k, &tail_v}) {
    pat::check(*tail, "tails", 4, kHalf, gpu);
    bool same = tail->size(0) == tail_k.size(0) && tail->size(1) == pat::kTokens && tail->size(2) == heads;
    for (int i = 0; i < 4; ++i) same = same && tail->stride(i) == tail_k.stride(i);
    TVM_FFI_CHECK(same && tail->size(3) == Variant::kDim, ValueError)
        << "tails must be 64 tokens of k's heads for each row";
  }
  const std::pair<const TensorView*, const char*> indices[] = {{&rows, "rows"}, {&seq_lens, "seq_lens"}, {&slots, "slots"}};
  for (const auto& [tensor, name] : indices) {
    pat::check(*tensor, name, 1, pat::kInt64, gpu);
    TVM_FFI_CHECK(tensor->size(0) == tokens, ValueError) << "rows, seq_lens and slots must be the new tokens'";
  }
  const int64_t ctas = (tokens + pat::kStoreTokens - 1) / pat::kStoreTokens * heads * 2;  // K's and V's
  TVM_FFI_CHECK(ctas <= std::numeric_limits<int>::max() && tail_k.size(0) <= std::numeric_limits<int>::max(), ValueError)
      << "there are too many tokens or rows";
  if (ctas == 0) return;
  pat::StoreParams p;
  p.k = k.data_ptr(), p.v = v.data_ptr(), p.tail_k = tail_k.data_ptr(), p.tail_v = tail_v.data_ptr();
  p.records = static_cast<uint8_t*>(records.data_ptr());
  p.rows = static_cast<const int64_t*>(rows.data_ptr()), p.seq_lens = static_cast<const int64_t*>(seq_lens.data_ptr());
  p.slots = static_cast<const int64_t*>(slots.data_ptr());
  p.k_token = k.stride(0), p.k_head = k.stride(1), p.v_token = v.stride(0), p.v_head = v.stride(1);
  p.tail_row = tail_k.stride(0), p.tail_token = tail_k.stride(1), p.tail_head = tail_k.stride(2);
  p.tokens = int(tokens), p.kv_heads = int(heads), p.num_rows = int(tail_k.size(0));
  p.num_slots = records.size(0) * pat::kTokens;
  tvm::ffi::CUDADeviceGuard guard(k.device().device_id);
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, k.device().device_id));
  if constexpr (pat::kIsPages<Kv>)
    launch(PageKernels<Kv, true>::kStore, int(ctas), pat::kStoreThreads, 0, stream, false, p);
}

// Unpacks pages of the pool to K and V, on the current stream. The GPU checks indices: a page that does not exist becomes
// zeros.
template <typename Kv>
void unpack(TensorView records, TensorView pages, TensorView k, TensorView v) {
  check_pages();
  const DLDevice gpu = pat::gpu_of(records);
  pat::check(records, "records", 3, pat::kUint8, gpu);
  check_records(records, records.size(1), gpu);
  pat::check(pages, "pages", 1, pat::kInt64, gpu);
  const std::pair<const TensorView*, const char*> made[] = {{&k, "k"}, {&v, "v"}};
  const int64_t count = pages.size(0), heads = records.size(1);
  for (const auto& [tensor, name] : made) {
    pat::check(*tensor, name, 4, kHalf, gpu);
    TVM_FFI_CHECK(tensor->size(0) >= count && tensor->size(1) == pat::kTokens && tensor->size(2) == heads &&
                      tensor->size(3) == Variant::kDim && tensor->is_contiguous() && is_aligned(*tensor),
                  ValueError)
        << name << " must be contiguous, " << pat::kTokens << " tokens of the records' KV heads with " << Variant::kDim
        << " dimensions for each of the pages";
  }
  TVM_FFI_CHECK(count * heads <= std::numeric_limits<int>::max(), ValueError) << "there are too many pages";
  if (count * heads == 0) return;
  pat::UnpackParams p;
  p.records = static_cast<const uint8_t*>(records.data_ptr()), p.pages = static_cast<const int64_t*>(pages.data_ptr());
  p.k = k.data_ptr(), p.v = v.data_ptr(), p.num_pages = records.size(0), p.kv_heads = int(heads);
  tvm::ffi::CUDADeviceGuard guard(records.device().device_id);
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, records.device().device_id));
  if constexpr (pat::kIsPages<Kv>)
    launch(PageKernels<Kv, true>::kUnpack, int(count * heads), pat::kUnpackThreads, 0, stream, false, p);
}

// Copies the used part of a plan from the host to the GPU on the current stream and records the cudaEvent_t `copied` behind
// it: one call, because the scheduler process waits for it.
void load(TensorView to, TensorView plan, int64_t copied) {
  pat::check(to, "to", 1, pat::kInt32, pat::gpu_of(to));
  TVM_FFI_CHECK(plan.device().device_type == kDLCPU || plan.device().device_type == kDLCUDAHost, ValueError)
      << "plan must be in host memory";
  pat::check(plan, "plan", 1, pat::kInt32, plan.device());
  const int32_t* from = static_cast<const int32_t*>(plan.data_ptr());
  TVM_FFI_CHECK(plan.size(0) >= pat::kHeaderSize && from[pat::kSize] >= pat::kHeaderSize &&
                    from[pat::kSize] <= std::min(plan.size(0), to.size(0)),
                ValueError)
      << "plan or to is shorter than the plan";
  tvm::ffi::CUDADeviceGuard guard(to.device().device_id);
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, to.device().device_id));
  check(cudaMemcpyAsync(to.data_ptr(), from, from[pat::kSize] * sizeof(int32_t), cudaMemcpyHostToDevice, stream));
  check(cudaEventRecord(reinterpret_cast<cudaEvent_t>(copied), stream));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, decode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(load, load);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store, store<Kv>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unpack, unpack<Kv>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workers, workers);
