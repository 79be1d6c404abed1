// The pack scheduler: takes the tree's events, knows the batch expected next, makes its plan here or on its own thread.
//
// One thread, the scheduler process's, calls everything. The planning thread shares the mirror and the batch under `mutex_`, which
// it holds while it copies out the batch's prefixes; what follows works on that copy. A plan carries the version of the
// batch that it was made for, every change of batch or paths makes another version, and `take` hands out nothing else.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "expected.h"
#include "extend.h"
#include "prices.h"
#include "mirror.h"
#include "plan_maker.h"

namespace pat {

class Scheduler {
 public:
  struct Taken {
    int buffer;
    bool ahead;  // made by the planning thread
    int64_t steps;
    int64_t gained = 0;  // the fewest tokens that a request of this batch gained since its length was last told
  };

  // Beyond these, sums of tokens and prices could overflow: 2^37 tokens are more than any pool holds.
  static constexpr int64_t kMaxSteps = 1 << 30, kMaxTokens = int64_t(1) << 37;
  // New tokens of one extend; more than SGLang prefills at once, whose plan has several ints for each.
  static constexpr int64_t kMaxExtend = 1 << 24;
  // Tokens that its work items read, before anything is shared; at kMaxTokenPrice each, their price has 62 bits.
  static constexpr int64_t kMaxReads = int64_t(1) << 40;

  // At least two buffers: one is in use while the next plan is written. They are used in turn.
  Scheduler(Config config, std::vector<Buffer> buffers, int64_t max_batch, int64_t max_slots)
      : config_(std::move(config)), buffers_(std::move(buffers)), max_slots_(max_slots), plans_(buffers_.size()) {
    mirror_.reserve(max_batch);
    expected_.reserve(max_batch);
    maker_.reserve(max_batch);
    totals_.statistics.query_sizes.assign(config_.max_queries + 1, 0);
    totals_.statistics.kv_by_queries.assign(config_.max_queries + 1, 0);
  }

  ~Scheduler() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // Events; mirror.h says what they do and when they throw. `high` and `low` are a node's head.

  void insert(int64_t id, int64_t parent, int64_t length, int64_t high, int64_t low) {
    std::lock_guard<std::mutex> lock(mutex_);
    mirror_.insert(id, parent, length, {high, low});
  }

  void split(int64_t id, int64_t upper, int64_t length, int64_t high, int64_t low) {
    std::lock_guard<std::mutex> lock(mutex_);
    mirror_.split(id, upper, length, {high, low});
  }

  // Requests below the node stay in the batch, and share nothing any more.
  void evict(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    mirror_.evict(id, [&](int32_t request) { expected_.path_changed(request); });
  }

  // Forgets every path; the requests stay, and share nothing.
  void reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    mirror_.clear();
    expected_.all_paths_changed();
  }

  // Requests are named by keys (mirror.h), and need not be known: whoever had such a request's row before is forgotten.

  // The request shares what is above the node.
  void bind(int64_t key, int64_t node) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_key(key);
    mirror_.known(node);
    const auto [request, orphan] = expected_.enter(key);
    mirror_.move(request, node);
    mirror_.prune(orphan);
    expected_.path_changed(request);
  }

  // The request gave its row back; it leaves the batch.
  void release(int64_t key) {
    std::lock_guard<std::mutex> lock(mutex_);
    expected_.leave(key);
    const int32_t request = mirror_.find_request(key);
    if (request != kNone) mirror_.release(request);
  }

  // The request keeps its path and leaves the batch.
  void withdraw(int64_t key) {
    std::lock_guard<std::mutex> lock(mutex_);
    expected_.leave(key);
  }

  int32_t find(int64_t id, int64_t& parent, int64_t& length) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int32_t node = mirror_.find(id);
    if (node > kRoot) parent = mirror_.node(mirror_.node(node).parent).id, length = mirror_.node(node).length;
    return node;
  }

  // The node below `parent` that starts with this head; kRootId if there is none.
  int64_t child(int64_t parent, int64_t high, int64_t low) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int32_t node = mirror_.child(mirror_.known(parent), {high, low});
    return node == kNone ? kRootId : mirror_.node(node).id;
  }

  int64_t any_request(int64_t node) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int32_t request = mirror_.any_request(mirror_.known(node));
    if (request == kNone) throw Inconsistent("node " + std::to_string(node) + " has no request");
    return mirror_.request(request).key;
  }

  // (node, where its path ends) of a request; false if it is not known.
  bool binding(int64_t key, int64_t& node, int64_t& end) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int32_t request = mirror_.find_request(key);
    if (request == kNone) return false;
    const Node& n = mirror_.node(mirror_.request(request).node);
    node = n.id, end = n.end();
    return true;
  }

  // The batch expected next (expected.h).

  // The request decodes next, behind all others if it is not in the batch yet; `length` is its tokens, as far as they are known.
  // Until it is bound it shares nothing.
  void expect(int64_t key, int64_t length) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_key(key);
    in_range("a request's tokens", length, 0, kMaxPosition);
    in_range("the batch", int64_t(expected_.size()) + 1, 0, kMaxBatch);
    expected_.make_room();
    const auto [request, orphan] = expected_.enter(key);
    mirror_.prune(orphan);
    expected_.join(request, key, length);
  }

  // Whether `keys` is the batch that the plan in use was made for, and nothing about it has changed since. Nobody else writes what
  // this reads, so that it need not wait for the planning thread.
  bool stands(const int64_t* keys, int64_t size) const {
    return planned_version_ == expected_.version() && expected_.is(keys, size);
  }

  // Let the planning thread make the next plan, for requests that have each `tokens` tokens more than were last told. It will be used for
  // requests that are longer, if the numbers of tokens by which they are differ by `spread` at most.
  void prepare(int64_t tokens, int64_t spread) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      check_steps(tokens), check_steps(spread);
      if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
      tokens_ahead_ = tokens, spread_ = spread;
      wanted_ = true;
    }
    wake_.notify_one();
  }

  // The plan for the batch `keys`, whose requests now have `seq_lens` tokens: the one made ahead if it is for this very batch, else
  // made now. The plan before it ran `steps` steps. Throws TooLarge if nothing fits.
  //
  // With `aside` the batch runs this one step only, and the one expected next stays what it was.
  Taken take(const int64_t* keys, const int64_t* seq_lens, int64_t size, int64_t steps, bool aside) {
    const auto lock = stop_planning(seq_lens, size, steps);
    const bool other = !expected_.is(keys, size);
    const Expected::Kept kept(expected_, aside && other);
    if (other) expected_.assign(keys, size);
    retire(steps);
    planned_version_ = kNone;
    const bool ahead = ready_ && ready_version_ == expected_.version() && fits(seq_lens);
    const int64_t gained = expected_.gained(seq_lens);
    totals_.requests += expected_.tell(seq_lens);
    ready_ = false;
    if (!ahead) {
      delta_ = 0;
      maker_.copy(mirror_, expected_.requests(), expected_.seq_lens(), 0, 0, config_.window, config_.piece);
      maker_.plan(config_, config_.policy, buffers_[back()], max_slots_, plans_[back()]);
    }
    hand_out();
    if (aside && other) return Taken{front_, ahead, 0};
    planned_version_ = expected_.version();
    return Taken{front_, ahead, buffers_[front_].data[kSteps] - delta_, gained};
  }

  // One query per work item, for when there is no plan to be had. With `stands` it is for the batch that `take` had no plan for: it may be used
  // until that changes.
  Taken fall_back(const int64_t* seq_lens, int64_t size, int64_t steps, bool stands) {
    const auto lock = stop_planning(seq_lens, size, steps);
    retire(steps);
    planned_version_ = kNone;
    ready_ = false;
    fallback_lens_.assign(seq_lens, seq_lens + size);
    fallback_batch_.assign(size, kNone);
    maker_.copy(mirror_, fallback_batch_, fallback_lens_, 0, 0, config_.window, config_.piece);
    Config whole = config_;
    if (config_.piece == 0) {      // whose parts would have other bits
      whole.grain = kMaxPosition;  // nothing is cut, so that no workspace is needed
      whole.wide_only = nullptr;   // whose grain would cut
    }
    maker_.plan(whole, Policy::kQuery, buffers_[back()], max_slots_, plans_[back()]);
    maker_.forget();  // it has another configuration
    hand_out();
    if (stands && size == int64_t(expected_.size())) {
      planned_version_ = expected_.version();
      return Taken{front_, false, buffers_[front_].data[kSteps]};
    }
    buffers_[front_].data[kSteps] = 0;
    return Taken{front_, false, 0};
  }

  // The plan of an extend: requests that have `cached` tokens and `added` new ones. It is no plan of the batch that decodes, and changes
  // nothing about that. Returns its ints.
  int64_t extend(const int64_t* keys, const int64_t* cached, const int64_t* added, int64_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    in_range("the batch", size, 0, kMaxBatch);
    int64_t tokens = 0, reads = 0;
    extending_.clear(), cached_.clear(), added_.clear();
    for (int64_t i = 0; i < size; ++i) {
      const int64_t before = in_range("a request's tokens", cached[i], 0, kMaxPosition);
      tokens += in_range("a request's new tokens", added[i], 0, kMaxPosition - before);
      in_range("new tokens", tokens, 0, kMaxExtend);
      reads += ceil_div(added[i], config_.whole_queries()) * (before + added[i]);
      in_range("tokens read", reads, 0, kMaxReads);
      extending_.push_back(mirror_.find_request(keys[i]));
      cached_.push_back(int32_t(before)), added_.push_back(int32_t(added[i]));
    }
    return extend_maker_.plan(mirror_, extending_, cached_, added_, config_);
  }

  // What made the last one.
  const ExtendMaker& extended() const { return extend_maker_; }

  // Counts up to now, the current plan having run `steps` steps.
  Totals totals(int64_t steps) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_steps(steps);
    Totals totals = totals_;
    if (in_use_) totals.add(plans_[front_], steps);
    return totals;
  }

  const Statistics& current() const { return plans_[front_]; }

  // Of the plan that was made last, which need not be the one in use.
  std::vector<int64_t> inspect() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return !planning_; });
    return maker_.inspect(config_);
  }

  // For tests: microseconds that the planning thread waits before it reads the batch, and before it publishes the plan.
  void set_delays(int64_t before_copy, int64_t before_publish) {
    std::lock_guard<std::mutex> lock(mutex_);
    delay_before_copy_ = before_copy, delay_before_publish_ = before_publish;
  }
  // For tests: waits until the planning thread has made what was asked for.
  void settle() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return !planning_ && !wanted_; });
  }
  int64_t version() { return expected_.version(); }
  size_t active_nodes() { return mirror_.active_nodes(); }
  size_t active_requests() { return mirror_.active_requests(); }
  const std::vector<int64_t>& batch() const { return expected_.keys(); }

  size_t bytes() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return !planning_; });
    return mirror_.bytes() + maker_.bytes() + extend_maker_.bytes();
  }

 private:
  static void check_key(int64_t key) {
    if (key < 0 || row_of(key) > kMaxPosition) throw Inconsistent("there is no request " + std::to_string(key));
  }

  static void check_steps(int64_t steps) { in_range("steps", steps, 0, kMaxSteps); }

  // For a plan that is made now, of this batch: what the planning thread was asked for is no longer wanted, and it makes nothing.
  std::unique_lock<std::mutex> stop_planning(const int64_t* seq_lens, int64_t size, int64_t steps) {
    std::unique_lock<std::mutex> lock(mutex_);
    in_range("the batch", size, 0, kMaxBatch);
    int64_t tokens = 0;
    for (int64_t i = 0; i < size; ++i) tokens += in_range("a request's tokens", seq_lens[i], 0, kMaxPosition);
    in_range("the batch's tokens", tokens, 0, kMaxTokens);
    check_steps(steps);
    wanted_ = false;
    idle_.wait(lock, [this] { return !planning_; });
    return lock;
  }

  int back() const { return (front_ + 1) % int(buffers_.size()); }

  void hand_out() {
    front_ = back();
    in_use_ = true;
  }

  // The plan in use has run `steps` steps and will run no more.
  void retire(int64_t steps) {
    if (in_use_) totals_.add(plans_[front_], steps);
    in_use_ = false;
  }

  // A plan made from shorter lengths is right as long as nothing has become shorter, and even as long as everything has
  // become longer nearly alike; how much longer, it stays good for that many steps less.
  bool fits(const int64_t* seq_lens) {
    const std::vector<int32_t>& made_for = maker_.seq_lens();
    int64_t least = INT64_MAX;
    delta_ = 0;
    for (size_t i = 0; i < made_for.size(); ++i) {
      const int64_t longer = seq_lens[i] - made_for[i];
      least = std::min(least, longer);
      delta_ = std::max(delta_, longer);
    }
    if (least < 0 || delta_ - least > spread_) return false;
    return delta_ == 0 || delta_ < buffers_[back()].data[kSteps] / 2;
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stop_ || wanted_; });
      if (stop_) return;
      pause(lock, delay_before_copy_);
      if (!wanted_) continue;  // taken meanwhile
      wanted_ = false;
      if (expected_.size() == 0) {
        idle_.notify_all();
        continue;
      }
      planning_ = true;
      ready_ = false;
      const int64_t version = expected_.version(), delay = delay_before_publish_;
      const int next = back();
      bool made = false;
      try {
        maker_.copy(mirror_, expected_.requests(), expected_.seq_lens(), expected_.told(), tokens_ahead_, config_.window,
                    config_.piece);
        lock.unlock();
        // `expect` is told lengths one at a time.
        const auto& lengths = maker_.seq_lens();
        made = std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) <= kMaxTokens;
        if (made) maker_.plan(config_, config_.policy, buffers_[next], max_slots_, plans_[next]);
      } catch (const std::exception&) {
        made = false;  // `take` plans again and reports
      }
      if (!lock.owns_lock()) lock.lock();
      pause(lock, delay);
      ready_ = made;
      ready_version_ = version;
      planning_ = false;
      idle_.notify_all();
    }
  }

  static void pause(std::unique_lock<std::mutex>& lock, int64_t microseconds) {
    if (microseconds == 0) return;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    lock.lock();
  }

  const Config config_;
  const std::vector<Buffer> buffers_;
  const int64_t max_slots_;

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::thread thread_;
  Mirror mirror_;
  Expected expected_{mirror_};
  int64_t planned_version_ = kNone;  // for which the plan in use was made

  PlanMaker maker_;  // used under the mutex, or by the planning thread while `planning_`
  bool wanted_ = false, planning_ = false, ready_ = false, stop_ = false;
  int64_t ready_version_ = 0, tokens_ahead_ = 0, spread_ = 0, delta_ = 0;
  int64_t delay_before_copy_ = 0, delay_before_publish_ = 0;

  std::vector<Statistics> plans_;  // of each buffer, written with it
  int front_ = 0;
  bool in_use_ = false;
  Totals totals_;
  std::vector<int32_t> fallback_batch_, fallback_lens_;
  ExtendMaker extend_maker_;
  std::vector<int32_t> extending_, cached_, added_;  // the requests of an extend, and their tokens
};

}  // namespace pat
