// The pack scheduler for Python. sglang_pat/kernels/scheduler.py is its one caller; handles are pointers, requests and
// nodes numbers. What an event may not do raises RuntimeError, a plan that does not fit ValueError.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "scheduler.h"

namespace {

using pat::Head;
using pat::Scheduler;
using tvm::ffi::TensorView;

Scheduler& at(int64_t handle) { return *reinterpret_cast<Scheduler*>(handle); }

template <typename T>
T* data(const TensorView& tensor, const char* name) {
  const DLDataType got = tensor.dtype();
  TVM_FFI_CHECK(tensor.device().device_type == kDLCPU || tensor.device().device_type == kDLCUDAHost, ValueError)
      << name << " must be in host memory";
  TVM_FFI_CHECK(tensor.ndim() == 1 && (tensor.size(0) == 0 || tensor.is_contiguous()), ValueError)
      << name << " must be one contiguous row";
  TVM_FFI_CHECK(got.code == kDLInt && got.bits == sizeof(T) * 8, ValueError)
      << name << " must be of int" << sizeof(T) * 8;
  return static_cast<T*>(tensor.data_ptr());
}

template <typename T>
std::vector<T> copied(const TensorView& tensor, const char* name) {
  const int64_t* from = data<int64_t>(tensor, name);
  return std::vector<T>(from, from + tensor.size(0));
}

template <typename Action>
auto guarded(Action action) {
  try {
    return action();
  } catch (const pat::Inconsistent& error) {
    TVM_FFI_THROW(RuntimeError) << error.what();
  } catch (const pat::TooLarge& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
}

// `numbers`: token_bytes, part_bytes, turn, group, kv_heads, workers, max_queries, few_queries, warp_queries, policy, max_batch,
// max_slots.
int64_t create(TensorView numbers, TensorView rates, TensorView items, TensorView short_tokens, TensorView query_tiles,
               TensorView kv_tiles, TensorView kv_bounds, TensorView first_buffer, TensorView second_buffer) {
  const std::vector<int64_t> n = copied<int64_t>(numbers, "numbers");
  pat::Config config{n[0],      n[1],      n[2],      int(n[3]), int(n[4]),
                     int(n[5]), int(n[6]), int(n[7]), int(n[8]), pat::Policy(n[9])};
  config.rates = copied<int64_t>(rates, "rates");
  config.items = copied<int64_t>(items, "items");
  config.short_tokens = copied<int64_t>(short_tokens, "short_tokens");
  config.query_tiles = copied<int>(query_tiles, "query_tiles");
  config.kv_tiles = copied<int>(kv_tiles, "kv_tiles");
  config.kv_bounds = copied<int>(kv_bounds, "kv_bounds");
  const auto equal = [&](const std::vector<int64_t>& prices) {
    return std::count(prices.begin() + 1, prices.end(), prices[1]) == config.max_queries;
  };
  config.flat = equal(config.rates) && equal(config.items);
  std::vector<pat::Buffer> buffers;
  for (const TensorView& buffer : {first_buffer, second_buffer})
    buffers.push_back(pat::Buffer{data<int32_t>(buffer, "buffers"), buffer.size(0)});
  return reinterpret_cast<int64_t>(new Scheduler(std::move(config), std::move(buffers), n[10], n[11]));
}

void destroy(int64_t handle) { delete &at(handle); }

void insert(int64_t handle, int64_t node, int64_t parent, int64_t length, int64_t high, int64_t low) {
  guarded([&] { at(handle).insert(node, parent, length, Head{high, low}); });
}

void split(int64_t handle, int64_t node, int64_t upper, int64_t length, int64_t high, int64_t low) {
  guarded([&] { at(handle).split(node, upper, length, Head{high, low}); });
}

// Returns how many requests lost their paths; `released` names them, as many as it holds.
int64_t evict(int64_t handle, int64_t node, TensorView released) {
  std::vector<int32_t> requests;
  try {
    at(handle).evict(node, requests);
  } catch (const pat::Inconsistent&) {
    std::copy_n(requests.begin(), std::min<int64_t>(requests.size(), released.size(0)),
                data<int64_t>(released, "released"));
    return int64_t(requests.size());
  }
  return -1;
}

void reset(int64_t handle) { at(handle).reset(); }

int64_t bind(int64_t handle, int64_t node, int64_t row) {
  return guarded([&] { return int64_t(at(handle).bind(node, int32_t(row))); });
}

void move(int64_t handle, int64_t request, int64_t node, int64_t row) {
  guarded([&] { at(handle).move(int32_t(request), node, int32_t(row)); });
}

int64_t release(int64_t handle, int64_t request) {
  return guarded([&] { return int64_t(at(handle).release(int32_t(request))); });
}

int64_t withdraw(int64_t handle, int64_t request) {
  return guarded([&] { return int64_t(at(handle).withdraw(int32_t(request))); });
}

bool find(int64_t handle, int64_t node, TensorView parent_and_length) {
  int64_t* to = data<int64_t>(parent_and_length, "parent_and_length");
  return at(handle).find(node, to[0], to[1]) > pat::kRoot;
}

int64_t child(int64_t handle, int64_t parent, int64_t high, int64_t low) {
  return guarded([&] { return at(handle).child(parent, Head{high, low}); });
}

int64_t any_request(int64_t handle, int64_t node) {
  return guarded([&] { return int64_t(at(handle).any_request(node)); });
}

void prune(int64_t handle, int64_t node) { at(handle).prune(node); }

void binding(int64_t handle, int64_t request, TensorView node_row_end) {
  int64_t* to = data<int64_t>(node_row_end, "node_row_end");
  guarded([&] { at(handle).binding(int32_t(request), to[0], to[1], to[2]); });
}

void set_batch(int64_t handle, TensorView requests) {
  guarded([&] { at(handle).set_batch(data<int32_t>(requests, "requests"), requests.size(0)); });
}

bool join(int64_t handle, int64_t request, int64_t length) {
  return guarded([&] { return at(handle).join(int32_t(request), length); });
}

void expect(int64_t handle, int64_t position, int64_t length) {
  guarded([&] { at(handle).expect(position, length); });
}

void adopt(int64_t handle, int64_t position, int64_t request) {
  guarded([&] { at(handle).adopt(position, int32_t(request)); });
}

void drop(int64_t handle, int64_t position) {
  guarded([&] { at(handle).drop(position); });
}

void prepare(int64_t handle, int64_t steps) { at(handle).prepare(steps); }

// Twice the buffer's number, plus one where the plan was made ahead. `steps_good` receives how long it stays good.
int64_t take(int64_t handle, TensorView seq_lens, int64_t steps, TensorView steps_good) {
  return guarded([&] {
    const Scheduler::Taken taken = at(handle).take(data<int64_t>(seq_lens, "seq_lens"), seq_lens.size(0), steps);
    data<int64_t>(steps_good, "steps_good")[0] = taken.steps;
    return int64_t(taken.buffer * 2 + taken.ahead);
  });
}

int64_t fall_back(int64_t handle, TensorView seq_lens, int64_t steps) {
  return guarded([&] {
    return int64_t(at(handle).fall_back(data<int64_t>(seq_lens, "seq_lens"), seq_lens.size(0), steps).buffer * 2);
  });
}

// Steps, requests, work items, parts, KV tokens, tokens of all requests; then work items with 1, 2, 3 ... queries.
void totals(int64_t handle, int64_t steps, TensorView to) {
  const Scheduler::Totals totals = at(handle).totals(steps);
  const pat::Statistics& sum = totals.statistics;
  int64_t* out = data<int64_t>(to, "to");
  const int64_t head[] = {totals.steps, totals.requests, sum.items, sum.parts, sum.kv_tokens, sum.seq_tokens};
  out = std::copy(std::begin(head), std::end(head), out);
  std::copy(sum.query_sizes.begin() + 1, sum.query_sizes.end(), out);
}

// KV tokens, parts and the longest bin's cost of the plan in use.
void current(int64_t handle, TensorView to) {
  const pat::Statistics& plan = at(handle).current();
  int64_t* out = data<int64_t>(to, "to");
  out[0] = plan.kv_tokens, out[1] = plan.parts, out[2] = plan.longest_bin;
}

int64_t version(int64_t handle) { return at(handle).version(); }
int64_t active_nodes(int64_t handle) { return int64_t(at(handle).active_nodes()); }
int64_t bytes(int64_t handle) { return int64_t(at(handle).bytes()); }
void set_delays(int64_t handle, int64_t before_copy, int64_t before_publish) {
  at(handle).set_delays(Scheduler::Delays{before_copy, before_publish});
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(create, create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(destroy, destroy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(insert, insert);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(split, split);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(evict, evict);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(reset, reset);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bind, bind);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(move, move);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(release, release);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(withdraw, withdraw);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(find, find);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(child, child);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(any_request, any_request);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prune, prune);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(binding, binding);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_batch, set_batch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(join, join);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expect, expect);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(adopt, adopt);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(drop, drop);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare, prepare);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(take, take);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fall_back, fall_back);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(totals, totals);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(current, current);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(active_nodes, active_nodes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bytes, bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_delays, set_delays);
