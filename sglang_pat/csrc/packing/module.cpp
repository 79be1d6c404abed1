// The pack scheduler for Python. sglang_pat/packing/native.py is its one caller; schedulers, requests and nodes are
// numbers. What an event may not do raises InconsistentError, arguments that cannot be ValueError, a plan that does not fit
// PlanTooLargeError. Nothing is believed: whatever the arguments, memory stays whole.

#include "../error.h"  // before what throws

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "scheduler.h"

namespace {

using pat::Scheduler;
using tvm::ffi::TensorView;

// Every scheduler that is not destroyed yet; handles count from `first_handle`.
std::mutex schedulers_mutex;
std::vector<std::unique_ptr<Scheduler>> schedulers;
int64_t first_handle = 0;

std::unique_ptr<Scheduler>& slot(int64_t handle) {
  TVM_FFI_CHECK(handle < 0 || handle >= first_handle, ValueError)
      << "scheduler " << handle << " is in the process that this one was forked from";
  TVM_FFI_CHECK(handle >= 0 && handle - first_handle < int64_t(schedulers.size()) && schedulers[handle - first_handle],
                ValueError)
      << "there is no scheduler " << handle;
  return schedulers[handle - first_handle];
}

Scheduler& at(int64_t handle) {
  std::lock_guard<std::mutex> lock(schedulers_mutex);
  return *slot(handle);
}

template <typename T>
T* data(const TensorView& tensor, const char* name) {
  const DLDataType got = tensor.dtype();
  TVM_FFI_CHECK(tensor.device().device_type == kDLCPU || tensor.device().device_type == kDLCUDAHost, ValueError)
      << name << " must be in host memory";
  TVM_FFI_CHECK(tensor.ndim() == 1 && (tensor.size(0) == 0 || tensor.is_contiguous()), ValueError)
      << name << " must be one contiguous row";
  TVM_FFI_CHECK(got.code == kDLInt && got.bits == sizeof(T) * 8, ValueError) << name << " must be of int" << sizeof(T) * 8;
  return static_cast<T*>(tensor.data_ptr());
}

// The same where at least `size` numbers are read or written.
template <typename T>
T* data(const TensorView& tensor, const char* name, int64_t size) {
  T* const begin = data<T>(tensor, name);
  TVM_FFI_CHECK(tensor.size(0) >= size, ValueError) << name << " must have " << size << " numbers or more";
  return begin;
}

// What `create` is told of a config, each by its name: a number or several. Every name has to be asked for.
using Values = tvm::ffi::Map<tvm::ffi::String, tvm::ffi::Array<int64_t>>;

class Named {
 public:
  explicit Named(const Values& values) : values_(values) {}

  int64_t number(const char* name) {
    const auto found = of(name);
    TVM_FFI_CHECK(found.size() == 1, ValueError) << name << " must be one number";
    return found[0];
  }
  int64_t number(const char* name, int64_t least, int64_t most) { return pat::in_range(name, number(name), least, most); }

  template <typename T>
  std::vector<T> list(const char* name) {
    std::vector<T> found;
    for (const int64_t value : of(name))
      found.push_back(T(pat::in_range(name, value, std::numeric_limits<T>::min(), std::numeric_limits<T>::max())));
    return found;
  }

  // Throws where there is a name that nobody asked for.
  void end() const {
    for (const auto& [name, numbers] : values_)
      TVM_FFI_CHECK(asked_.count(std::string(name)) > 0, ValueError) << "a config has no " << std::string(name);
  }

 private:
  tvm::ffi::Array<int64_t> of(const char* name) {
    TVM_FFI_CHECK(values_.count(name) > 0, ValueError) << "a config must say " << name;
    asked_.insert(name);
    return values_[name];
  }

  const Values& values_;
  std::set<std::string> asked_;
};

template <typename Action>
auto guarded(Action action) {
  try {
    return action();
  } catch (const pat::Inconsistent& error) {
    TVM_FFI_THROW(InconsistentError) << error.what();
  } catch (const pat::TooLarge& error) {
    TVM_FFI_THROW(PlanTooLargeError) << error.what();
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
}

// A config by sglang_pat/packing/native.py, `_values`.
pat::Config config_of(const Values& given) {
  using pat::kMaxItemPrice, pat::kMaxTile, pat::kMaxWorkers;
  Named values(given);
  pat::Config config;
  config.token_bytes = values.number("token_bytes", 1, pat::kMaxTokenPrice);
  config.part_bytes = values.number("part_bytes", 0, kMaxItemPrice);
  config.turn_price = values.number("turn_price", 0, kMaxItemPrice);
  config.bin_end_price = values.number("bin_end_price", 0, kMaxItemPrice);
  config.wave_price = values.number("wave_price", 0, kMaxItemPrice);
  config.narrow_first_price = values.number("narrow_first_price", 0, kMaxItemPrice);
  config.group = values.number("group", 1, kMaxTile);
  config.runs = values.number("runs", 1, kMaxWorkers);
  config.workers = values.number("workers", 1, kMaxWorkers);
  config.max_queries = values.number("max_queries", 1, kMaxTile);
  config.few_queries = values.number("few_queries", 1, config.max_queries);
  config.warp_queries = values.number("warp_queries", 0, kMaxTile);
  config.rebalance_queries = values.number("rebalance_queries", 0, config.max_queries);
  config.tails_queries = values.number("tails_queries", 1, config.max_queries);
  config.straddled_rows = values.number("straddled_rows", 0, kMaxTile);
  config.policy = pat::Policy(values.number("policy", 0, int(pat::Policy::kOptimal)));
  config.window = values.number("window", 0, pat::kMaxWindow);
  config.grain = values.number("grain", 1, kMaxTile);
  config.piece = values.number("piece", 0, pat::kMaxWindow);
  config.kv_tile = values.number("kv_tile", 1, kMaxTile);
  config.warp_tokens = values.number("warp_tokens", 1, pat::kMaxWarpTokens);
  config.slices_tokens = values.number("slices_tokens", -1, INT32_MAX);
  config.slice_rows = values.number("slice_rows", config.slices_tokens >= 0 ? 1 : 0, kMaxTile);
  config.pack_prices = {values.list<int64_t>("token_prices"), values.list<int64_t>("start_prices"),
                        values.number("slices_token_price"), values.number("slices_start_price")};
  config.bin_prices = {values.list<int64_t>("bin_token_prices"), values.list<int64_t>("bin_start_prices"),
                       values.number("bin_slices_token_price"), values.number("bin_slices_start_price")};
  config.short_tokens = values.list<int64_t>("short_tokens");
  config.query_tiles = values.list<int>("query_tiles");
  values.end();
  config.check();
  return config;
}

pat::WideLimits limits_of(const Values& given) {
  Named values(given);
  pat::WideLimits limits;
  constexpr int64_t kMostQueries = pat::kMaxBatch * pat::kMaxWorkers, kMostTokens = int64_t(1) << 50;
  limits.small_queries = values.number("small_queries", 0, kMostQueries);
  limits.small_tokens = values.number("small_tokens", 0, kMostTokens);
  limits.small_sharing = values.number("small_sharing", 1, 1 << 12);
  limits.small_draft_tokens = values.number("small_draft_tokens", 0, kMostTokens);
  limits.little_shared_queries = values.number("little_shared_queries", 0, kMostQueries);
  limits.ragged_queries = values.number("ragged_queries", 0, kMostQueries);
  limits.ragged_tokens = values.number("ragged_tokens", 0, pat::kMaxPosition);
  values.end();
  return limits;
}

// A scheduler for batches of up to `max_batch` requests, and plans of up to `max_slots` parts, which it writes into the buffers.
int64_t create(const Values& values, const Values& wide_values, const Values& limits, int64_t max_batch, int64_t max_slots,
               TensorView first_buffer, TensorView second_buffer) {
  return guarded([&] {
    pat::Config config = config_of(values);
    config.plan_wide(limits_of(limits), config_of(wide_values));
    std::vector<pat::Buffer> buffers;
    for (const TensorView& buffer : {first_buffer, second_buffer})
      buffers.push_back(pat::Buffer{data<int32_t>(buffer, "buffers", pat::kHeaderSize), buffer.size(0)});
    auto made = std::make_unique<Scheduler>(std::move(config), std::move(buffers),
                                            pat::in_range("max_batch", max_batch, 0, pat::kMaxBatch), max_slots);
    std::lock_guard<std::mutex> lock(schedulers_mutex);
    const auto free = std::find(schedulers.begin(), schedulers.end(), nullptr);
    const int64_t handle = first_handle + (free - schedulers.begin());
    if (free == schedulers.end())
      schedulers.push_back(std::move(made));
    else
      *free = std::move(made);
    return handle;
  });
}

void destroy(int64_t handle) {
  std::unique_ptr<Scheduler> gone;  // joins its thread, outside of the lock
  std::lock_guard<std::mutex> lock(schedulers_mutex);
  if (handle < 0 || handle >= first_handle) gone.swap(slot(handle));
}

// In the child of a fork. The planning threads are not there: what they hold is never released, they cannot be joined, and what they were making is
// unfinished. So the schedulers stay where they are, and are not to be had.
void abandon() {
  new (&schedulers_mutex) std::mutex;  // of a thread that is not there, maybe
  first_handle += int64_t(schedulers.size());
  static auto& abandoned = *new std::vector<std::unique_ptr<Scheduler>>;  // until the process ends, without destructors
  std::move(schedulers.begin(), schedulers.end(), std::back_inserter(abandoned));
  schedulers.clear();
}

bool find(int64_t handle, int64_t node, TensorView parent_and_length) {
  int64_t* to = data<int64_t>(parent_and_length, "parent_and_length", 2);
  return at(handle).find(node, to[0], to[1]) > pat::kRoot;
}

bool binding(int64_t handle, int64_t request, TensorView node_and_end) {
  int64_t* to = data<int64_t>(node_and_end, "node_and_end", 2);
  return at(handle).binding(request, to[0], to[1]);
}

// Copies the batch expected next to `to`, as far as that has room; returns how many requests it has.
int64_t batch(int64_t handle, TensorView to) {
  const std::vector<int64_t>& keys = at(handle).batch();
  std::copy_n(keys.begin(), std::min<int64_t>(keys.size(), to.size(0)), data<int64_t>(to, "to"));
  return int64_t(keys.size());
}

bool stands(int64_t handle, TensorView requests) {
  return at(handle).stands(data<int64_t>(requests, "requests"), requests.size(0));
}

// Twice the buffer's number, plus one where the plan was made ahead. `numbers` receives how long it stays good, and the fewest tokens that a
// request gained.
int64_t take(int64_t handle, TensorView requests, TensorView seq_lens, int64_t steps, bool aside, TensorView numbers) {
  int64_t* to = data<int64_t>(numbers, "numbers", 2);
  const int64_t size = requests.size(0);
  return guarded([&] {
    const Scheduler::Taken taken =
        at(handle).take(data<int64_t>(requests, "requests"), data<int64_t>(seq_lens, "seq_lens", size), size, steps, aside);
    to[0] = taken.steps, to[1] = taken.gained;
    return int64_t(taken.buffer * 2 + taken.ahead);
  });
}

// Likewise.
int64_t fall_back(int64_t handle, TensorView seq_lens, int64_t steps, bool stands, TensorView steps_good) {
  int64_t* to = data<int64_t>(steps_good, "steps_good", 1);
  return guarded([&] {
    const Scheduler::Taken taken =
        at(handle).fall_back(data<int64_t>(seq_lens, "seq_lens"), seq_lens.size(0), steps, stands);
    to[0] = taken.steps;
    return int64_t(taken.buffer * 2);
  });
}

// Makes an extend's plan, which `extended` copies; returns its ints.
int64_t extend(int64_t handle, TensorView requests, TensorView cached, TensorView added) {
  const int64_t size = requests.size(0);
  return guarded([&] {
    return at(handle).extend(data<int64_t>(requests, "requests"), data<int64_t>(cached, "cached", size),
                             data<int64_t>(added, "added", size), size);
  });
}

// The plan; and the prefixes that several requests read together by it, what it costs, and what reading each request's KV for it alone does.
void extended(int64_t handle, TensorView to, TensorView numbers) {
  const pat::ExtendMaker& made = at(handle).extended();
  std::copy_n(made.data().data(), std::min<int64_t>(made.data().size(), to.size(0)), data<int32_t>(to, "to"));
  int64_t* out = data<int64_t>(numbers, "numbers", 3);
  out[0] = made.shared(), out[1] = made.price(), out[2] = made.alone();
}

// Steps, requests, steps that pack nothing as nothing is shared, and as that would cost more, work items, parts, KV tokens,
// tokens of all requests; then work items with 1, 2, 3 ... queries; then KV tokens read for as many.
void totals(int64_t handle, int64_t steps, TensorView to) {
  const pat::Totals totals = guarded([&] { return at(handle).totals(steps); });
  const pat::Statistics& sum = totals.statistics;
  int64_t* out = data<int64_t>(to, "to", 6 + 2 * int64_t(sum.query_sizes.size()));
  const int64_t head[] = {totals.steps, totals.requests, totals.unshared, totals.unpaid,
                          sum.items,    sum.parts,       sum.kv_tokens,   sum.seq_tokens};
  out = std::copy(std::begin(head), std::end(head), out);
  out = std::copy(sum.query_sizes.begin() + 1, sum.query_sizes.end(), out);
  std::copy(sum.kv_by_queries.begin() + 1, sum.kv_by_queries.end(), out);
}

// KV tokens, parts, the longest bin's price and the packed levels of the plan in use.
void current(int64_t handle, TensorView to) {
  const pat::Statistics& plan = at(handle).current();
  int64_t* out = data<int64_t>(to, "to", 4);
  out[0] = plan.kv_tokens, out[1] = plan.parts, out[2] = plan.longest_bin, out[3] = plan.levels;
}

// Copies what tools ask of the plan that was made last (plan_maker.h) to `to`, as far as that has room; returns how many numbers there are.
int64_t inspect(int64_t handle, TensorView to) {
  const std::vector<int64_t> found = guarded([&] { return at(handle).inspect(); });
  std::copy_n(found.begin(), std::min<int64_t>(found.size(), to.size(0)), data<int64_t>(to, "to"));
  return int64_t(found.size());
}

// A method of a scheduler that needs no more than numbers, as a function of its handle.
template <auto kMethod>
struct Method;
template <typename Result, typename... Numbers, Result (Scheduler::*kMethod)(Numbers...)>
struct Method<kMethod> {
  static Result call(int64_t handle, Numbers... numbers) {
    return guarded([&] { return (at(handle).*kMethod)(numbers...); });
  }
};

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(create, create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(destroy, destroy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(abandon, abandon);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(insert, Method<&Scheduler::insert>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(split, Method<&Scheduler::split>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(evict, Method<&Scheduler::evict>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(reset, Method<&Scheduler::reset>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bind, Method<&Scheduler::bind>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(release, Method<&Scheduler::release>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(withdraw, Method<&Scheduler::withdraw>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(find, find);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(child, Method<&Scheduler::child>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(any_request, Method<&Scheduler::any_request>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(binding, binding);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expect, Method<&Scheduler::expect>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(batch, batch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(stands, stands);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare, Method<&Scheduler::prepare>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(take, take);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fall_back, fall_back);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(extend, extend);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(extended, extended);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(totals, totals);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(current, current);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(inspect, inspect);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, Method<&Scheduler::version>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(active_nodes, Method<&Scheduler::active_nodes>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(active_requests, Method<&Scheduler::active_requests>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bytes, Method<&Scheduler::bytes>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_delays, Method<&Scheduler::set_delays>::call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(settle, Method<&Scheduler::settle>::call);
