// The CPU executor: for each work item and KV head the online softmax of forward.h, in parallel, then the merge of each
// query's parts (merge.h). sglang_pat/kernels/cpu.py is its one caller.

#include "../error.h"  // before what throws

#include <tvm/ffi/function.h>

#include <algorithm>
#include <exception>
#include <vector>

#include "../arguments.h"
#include "../packing/layout.h"
#include "bounds.h"
#include "forward.h"
#include "low_bit.h"
#include "merge.h"

namespace {

using tvm::ffi::TensorView;

struct Arguments {
  TensorView q, out;
  pat::Plan plan;
  pat::KvView kv;
  TensorView tails;  // offsets in k and v of the tokens behind the last full page; empty without pages
  pat::Tables tables;
  pat::Scores scores;
  const pat::LowBit* form;  // format of pages; null without pages
  pat::Shape shape;
  int64_t window;  // tokens that a query sees, 0: all

  const int32_t* section(pat::Header which) const {
    const int32_t* header = static_cast<const int32_t*>(plan.ints.data_ptr());
    return header + header[which];
  }
  int tokens() const { return int(tables.masks.size(1)); }  // of each query; 0 without masks
  bool has_sinks() const { return scores.sinks.size(0) > 0; }
  float sink(int64_t head) const { return static_cast<const float*>(scores.sinks.data_ptr())[head]; }
};

template <typename E>
const E* data(const TensorView& tensor) {
  return static_cast<const E*>(tensor.data_ptr());
}

// Which part of a query's KV is read: all, its full pages, or the tokens behind them.
enum class Kept { kAll, kPages, kTail };

// Tokens in the full pages of a request.
int64_t in_pages(int64_t tokens) { return tokens / pat::kPageTokens * pat::kPageTokens; }

// What the rows of a work item see of the `length` tokens from `start` on: those before their own end, within their window,
// and of the part `kept`. With masks a query is the last tokens of its request, with equally many consecutive rows each,
// and sees those in its mask.
pat::Visible visible_of(const Arguments& a, const int32_t* queries, int rows, int group, int32_t start, int length,
                        Kept kept, pat::Scratch& scratch) {
  const int all = pat::round_up(rows, pat::kWidth);
  int32_t *begins = pat::Scratch::get(scratch.begins, all), *ends = pat::Scratch::get(scratch.ends, all);
  int32_t* firsts = pat::Scratch::get(scratch.firsts, all);
  uint64_t* masks = a.tokens() ? pat::Scratch::get(scratch.masks, all) : nullptr;
  pat::Visible visible{begins, ends, firsts, masks, 0, length};
  // Rows that only pad a vector see everything; their results are dropped.
  std::fill_n(begins, all, 0);
  std::fill_n(ends, all, length);
  std::fill_n(firsts, all, length);
  if (masks) std::fill_n(masks, all, ~uint64_t{0});
  for (int i = 0; i < rows; ++i) {
    const int64_t query = queries[i / group], tokens = data<int64_t>(a.tables.seq_lens)[query];
    const int64_t end = kept == Kept::kPages ? in_pages(tokens) : tokens;
    int64_t own_end = end;  // of the row's token
    if (masks) {
      const int64_t drafted = a.tokens(), first = end - drafted;
      masks[i] = data<uint64_t>(a.tables.masks)[query * drafted + i % group / (group / drafted)];
      firsts[i] = int32_t(std::min<int64_t>(first - start, length));
      own_end = first + __builtin_popcountll(masks[i]);
      visible.all_end = std::min(visible.all_end, std::max(0, firsts[i]));
    }
    const int64_t begin = kept == Kept::kTail ? in_pages(tokens) : a.window ? std::max<int64_t>(0, own_end - a.window) : 0;
    begins[i] = int32_t(std::clamp<int64_t>(begin - start, 0, length));
    ends[i] = int32_t(std::clamp<int64_t>(end - start, 0, length));
    visible.all_begin = std::max(visible.all_begin, begins[i]);
    visible.all_end = std::min(visible.all_end, ends[i]);
  }
  return visible;
}

// Adds a work item's KV from pages, and from k and v the tokens behind the queries' last full pages: their index there is
// the position plus the query's `tails`.
template <typename T>
void add_pages(const Arguments& a, const int32_t* queries, int count, int group, int32_t start, int length,
               const int32_t* kv_slots, const pat::KvHead<T>& tails, int kv_head, pat::OnlineSoftmax& softmax,
               pat::Scratch& scratch) {
  const int64_t end = start + length;
  int64_t paged = 0, first = end, last = 0, offset = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t tokens = data<int64_t>(a.tables.seq_lens)[queries[i]], full = in_pages(tokens);
    paged = std::max(paged, full - start);
    if (std::max<int64_t>(full, start) >= std::min(tokens, end)) continue;
    const int64_t own = data<int64_t>(a.tails)[queries[i]];
    TVM_FFI_CHECK(first == end || own == offset, ValueError)
        << "the plan has several requests read a page that is not full";
    offset = own, first = std::min(first, std::max<int64_t>(full, start)), last = std::max(last, std::min(tokens, end));
  }
  const int pages = int(std::min<int64_t>(paged, length));
  pat::check_kv_slots(kv_slots, pages, a.kv.records.size(0) * pat::kPageTokens);
  pat::PageReader reader(*a.form);
  const pat::PagesOfHead head{reader, data<uint8_t>(a.kv.records) + kv_head * a.kv.records.stride(1),
                              a.kv.records.stride(0)};
  softmax.add(head, kv_slots, start, pages,
              visible_of(a, queries, count * group, group, start, pages, Kept::kPages, scratch));

  const int behind = int(std::max<int64_t>(0, last - first));
  int32_t* where = pat::Scratch::get(scratch.slots, behind);
  for (int i = 0; i < behind; ++i) where[i] = int32_t(first + i + offset);
  const pat::Visible visible = visible_of(a, queries, count * group, group, int32_t(first), behind, Kept::kTail, scratch);
  softmax.add(tails, where, int32_t(first), behind, visible);
}

template <typename T>
void run_item(const Arguments& a, int item, int kv_head, std::vector<float>& q_rows, std::vector<float>& results,
              pat::Scratch& scratch) {
  const int32_t* work = a.section(pat::kItems) + int64_t(item) * pat::kItemSize;
  const int32_t* queries = a.section(pat::kQueries) + work[pat::kFirstQuery];
  const int32_t* slots = a.section(pat::kSlots) + work[pat::kFirstQuery];
  const int heads = a.q.size(1), kv_heads = a.kv.k.size(1), group = heads / kv_heads;
  const int d = a.shape.head_dim, dv = a.shape.v_head_dim, rows = work[pat::kItemQueries] * group;

  const int32_t member = queries[0];
  const int64_t tokens = data<int64_t>(a.tables.seq_lens)[member];
  const int32_t start = pat::position(work[pat::kStart], tokens), end = pat::position(work[pat::kEnd], tokens);
  const int32_t* kv_slots =
      data<int32_t>(a.tables.req_to_token) + data<int64_t>(a.tables.rows)[member] * a.tables.req_to_token.stride(0) + start;

  const int length = std::max(0, end - start);
  const float scale = float(a.scores.scale);
  q_rows.resize(std::max(q_rows.size(), size_t(rows) * d));
  results.resize(std::max(results.size(), size_t(rows) * (dv + 1)));
  for (int i = 0; i < rows; ++i) {
    const float* q = data<float>(a.q) + queries[i / group] * a.q.stride(0) + (kv_head * group + i % group) * a.q.stride(1);
    for (int c = 0; c < d; ++c) q_rows[size_t(i) * d + c] = q[c] * scale;
  }
  const pat::KvHead<T> kv{data<T>(a.kv.k) + kv_head * a.kv.k.stride(1), data<T>(a.kv.v) + kv_head * a.kv.v.stride(1),
                          a.kv.k.stride(0), a.kv.v.stride(0), a.shape};
  float* lse = results.data() + size_t(rows) * dv;
  pat::OnlineSoftmax softmax(a.shape, q_rows.data(), rows, length, scratch);
  if (a.form) {
    add_pages(a, queries, work[pat::kItemQueries], group, start, length, kv_slots, kv, kv_head, softmax, scratch);
  } else {
    pat::check_kv_slots(kv_slots, length, a.kv.k.size(0));
    softmax.add(kv, kv_slots, start, length, visible_of(a, queries, rows, group, start, length, Kept::kAll, scratch));
  }
  softmax.finish(results.data(), lse);

  for (int i = 0; i < rows; ++i) {
    const int query = queries[i / group], slot = slots[i / group], head = kv_head * group + i % group;
    float* to = static_cast<float*>(slot < 0 ? a.out.data_ptr() : a.plan.partial.data_ptr());
    to += (int64_t(slot < 0 ? query : slot) * heads + head) * dv;
    std::copy_n(results.data() + size_t(i) * dv, dv, to);
    if (slot < 0 && a.has_sinks()) {
      const float share = pat::share_beside(a.sink(head), lse[i]);
      for (int c = 0; c < dv; ++c) to[c] *= share;
    }
    if (slot >= 0) static_cast<float*>(a.plan.lse.data_ptr())[int64_t(slot) * heads + head] = lse[i];
  }
}

template <typename T>
void run(const Arguments& a) {
  const int kv_heads = a.kv.k.size(1), heads = a.q.size(1), dv = a.shape.v_head_dim;
  const int64_t tasks = data<int32_t>(a.plan.ints)[pat::kNumItems] * int64_t(kv_heads);
  // An exception (out of memory) must not leave a parallel region.
  std::exception_ptr failure;
#pragma omp parallel
  {
    static thread_local std::vector<float> q_rows, results;
    static thread_local pat::Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      try {
        run_item<T>(a, int(task / kv_heads), int(task % kv_heads), q_rows, results, scratch);
      } catch (...) {
#pragma omp critical
        failure = std::current_exception();
      }
    }
    const int32_t* offsets = a.section(pat::kPartOffsets);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < a.q.size(0) * heads; ++task) {
      const int64_t query = task / heads, head = task % heads, first = offsets[query];
      const int parts = offsets[query + 1] - first;
      if (parts > 0)
        pat::merge(data<float>(a.plan.partial) + (first * heads + head) * dv, int64_t(heads) * dv,
                   data<float>(a.plan.lse) + first * heads + head, heads, parts, dv,
                   a.has_sinks() ? a.sink(head) : -INFINITY, static_cast<float*>(a.out.data_ptr()) + task * dv);
    }
  }
  if (failure) std::rethrow_exception(failure);
}

// Checks pages and `tails`: what is wrong, or null.
const char* pages_problem(const TensorView& pages, const TensorView& tails, const TensorView& k, const TensorView& v,
                          const int64_t* seq_lens, int64_t batch, int64_t bits, int64_t window, int64_t drafted) {
  if (!pat::LowBit::exists(bits, k.size(2)) || v.size(2) != k.size(2))
    return "pages have 4 or 2 bits, and K and V a multiple of 32 dimensions up to 256 in common";
  if (pages.size(1) != k.size(1) || pages.size(2) != pat::LowBit(int(bits), int(k.size(2))).bytes())
    return "pages have other heads, or as many bytes as other bits do";
  if (window || drafted) return "KV of few bits has neither windows nor drafts";
  if (tails.size(0) != batch || !tails.is_contiguous()) return "tails must be the batch's";
  const int64_t *offsets = static_cast<const int64_t*>(tails.data_ptr()), most = pat::kMostTailTokens;
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t from = in_pages(seq_lens[i]), to = seq_lens[i];
    if (from == to) continue;
    if (offsets[i] < -most || offsets[i] > most || from + offsets[i] < 0 || to + offsets[i] > k.size(0))
      return "the tokens behind the last full page are not in k and v";
  }
  return nullptr;
}

void attention(TensorView q, TensorView k, TensorView v, TensorView out, TensorView req_to_token, TensorView rows,
               TensorView seq_lens, TensorView plan, TensorView partial, TensorView lse, TensorView sinks, TensorView masks,
               TensorView pages, TensorView tails, int64_t bits, double scale, double logit_cap, int64_t window) {
  pat::check(q, "q", 3, pat::kFloat32, pat::kCpu);
  pat::check(out, "out", 3, pat::kFloat32, pat::kCpu);
  pat::check(k, "k", 3, k.dtype(), pat::kCpu);
  pat::check(v, "v", 3, k.dtype(), pat::kCpu);
  const pat::Plan planned{plan, partial, lse};
  const pat::KvView kv{k, v, pages, 1};
  const pat::Tables tables{req_to_token, rows, seq_lens, masks};
  const pat::Scores scores{scale, logit_cap, sinks};
  pat::check(planned, tables, q, k, out, pat::kFloat32, pat::kCpu);
  pat::check_sinks(sinks, pat::kFloat32, q.size(1), pat::kCpu);
  pat::check(masks, "masks", 2, pat::kInt64, pat::kCpu);
  const int64_t batch = q.size(0), heads = q.size(1), tokens = masks.size(1);
  TVM_FFI_CHECK(k.size(0) == v.size(0) && k.size(1) == v.size(1) && q.size(2) == k.size(2), ValueError)
      << "q, k and v do not fit each other";
  TVM_FFI_CHECK(out.size(0) == batch && out.size(1) == heads && out.size(2) == v.size(2), ValueError)
      << "out has the wrong shape";
  TVM_FFI_CHECK(rows.size(0) == batch && seq_lens.size(0) == batch, ValueError) << "rows and seq_lens must be the batch's";
  TVM_FFI_CHECK(partial.size(1) == heads && partial.size(2) == v.size(2) && lse.size(1) == heads, ValueError)
      << "partial and lse must be those of q's heads";
  TVM_FFI_CHECK(q.size(2) <= pat::kMostDims && v.size(2) <= pat::kMostDims, ValueError)
      << "heads of " << std::max(q.size(2), v.size(2)) << " dimensions are too large";
  const pat::Bounds bounds{plan.size(0),
                           batch,
                           req_to_token.size(0),
                           std::min<int64_t>(req_to_token.size(1), INT32_MAX),
                           std::min(partial.size(0), lse.size(0)),
                           heads / k.size(1)};
  const char* problem = pat::plan_problem(data<int32_t>(plan), bounds);
  if (!problem) problem = pat::batch_problem(data<int64_t>(rows), data<int64_t>(seq_lens), bounds);
  if (!problem) problem = pat::open_problem(data<int32_t>(plan), data<int64_t>(rows), data<int64_t>(seq_lens));
  if (!problem && tokens > 0) problem = pat::masks_problem(data<int64_t>(seq_lens), masks, batch, heads / k.size(1));
  if (!problem && window < 0) problem = "a window has 0 tokens or more";
  pat::check(pages, "pages", 3, pat::kUint8, pat::kCpu);
  pat::check(tails, "tails", 1, pat::kInt64, pat::kCpu);
  if (!problem && bits) problem = pages_problem(pages, tails, k, v, data<int64_t>(seq_lens), batch, bits, window, tokens);
  TVM_FFI_CHECK(!problem, ValueError) << problem;
  const pat::LowBit form(bits ? int(bits) : 4, bits ? int(k.size(2)) : 0);
  const pat::Shape shape{int(q.size(2)), int(v.size(2)), float(logit_cap)};
  const Arguments arguments{q, out, planned, kv, tails, tables, scores, bits ? &form : nullptr, shape, window};
  const DLDataType type = k.dtype();
  if (type.code == kDLFloat && type.bits == 32) return run<float>(arguments);
  if (type.code == kDLFloat && type.bits == 16) return run<pat::Fp16>(arguments);
  if (type.code == kDLBfloat && type.bits == 16) return run<pat::Bf16>(arguments);
  if (type.code == kDLFloat8_e4m3fn) return run<pat::E4m3>(arguments);
  if (type.code == kDLFloat8_e5m2) return run<pat::E5m2>(arguments);
  TVM_FFI_THROW(ValueError) << "KV must be float32, float16, bfloat16, float8_e4m3fn or float8_e5m2";
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention, attention);
