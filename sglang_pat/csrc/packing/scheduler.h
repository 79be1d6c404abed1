// The pack scheduler: takes the tree's events, knows the batch expected next, makes its plan here or on its own thread.
//
// One thread, the engine's, calls everything. The planning thread shares the mirror and the batch under `mutex_`, which
// it holds while it copies out the batch's prefixes; what follows works on that copy. A plan carries the version of the
// batch that it was made for, every change of batch or paths makes another version, and `take` hands out nothing else.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "config.h"
#include "mirror.h"
#include "plan_maker.h"

namespace pat {

class Scheduler {
 public:
  // Delays, in microseconds, that tests put between the planning thread's steps.
  struct Delays {
    int64_t before_copy = 0, before_publish = 0;
  };

  struct Taken {
    int buffer;
    bool ahead;  // made by the planning thread
    int64_t steps;
  };

  struct Totals {
    Statistics statistics;  // summed over steps
    int64_t steps = 0, requests = 0;
  };

  // At least two buffers: one is in use while the next plan is written. They are used in turn.
  Scheduler(Config config, std::vector<Buffer> buffers, int64_t max_batch, int64_t max_slots)
      : config_(std::move(config)), buffers_(std::move(buffers)), max_slots_(max_slots), plans_(buffers_.size()) {
    mirror_.reserve(max_batch);
    batch_.reserve(max_batch);
    seq_lens_.reserve(max_batch);
    maker_.reserve(max_batch);
    totals_.statistics.query_sizes.assign(config_.max_queries + 1, 0);
  }

  ~Scheduler() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // Events; mirror.h says what they do and when they throw.

  void insert(int64_t id, int64_t parent, int64_t length, Head head) {
    std::lock_guard<std::mutex> lock(mutex_);
    mirror_.insert(id, parent, length, head);
  }

  void split(int64_t id, int64_t upper, int64_t length, Head head) {
    std::lock_guard<std::mutex> lock(mutex_);
    mirror_.split(id, upper, length, head);
  }

  void evict(int64_t id, std::vector<int32_t>& released) {
    std::lock_guard<std::mutex> lock(mutex_);
    mirror_.evict(id, [&](int32_t request) {
      released.push_back(request);
      leave(request, /*stays=*/true);
      mirror_.release(request);
    });
  }

  // Forgets every path; the batch stays, with nothing known about it.
  void reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const int32_t request : batch_)
      if (request != kNone) mirror_.request(request).position = kNone;
    std::fill(batch_.begin(), batch_.end(), kNone);
    mirror_.clear();
    ++version_;
  }

  int32_t bind(int64_t node, int32_t row) {
    std::lock_guard<std::mutex> lock(mutex_);
    return mirror_.bind(node, row);
  }

  void move(int32_t request, int64_t node, int32_t row) {
    std::lock_guard<std::mutex> lock(mutex_);
    check(request);
    mirror_.move(request, node, row);
    if (mirror_.request(request).position != kNone) ++version_;
  }

  // Returns where in the batch the request was, -1 if it was not.
  int32_t release(int32_t request) {
    std::lock_guard<std::mutex> lock(mutex_);
    check(request);
    const int32_t position = leave(request, /*stays=*/false);
    mirror_.release(request);
    return position;
  }

  // The request keeps its path and leaves the batch. Returns where it was, -1 if it was not there.
  int32_t withdraw(int32_t request) {
    std::lock_guard<std::mutex> lock(mutex_);
    check(request);
    return leave(request, /*stays=*/false);
  }

  int32_t find(int64_t id, int64_t& parent, int64_t& length) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int32_t node = mirror_.find(id);
    if (node > kRoot) parent = mirror_.node(mirror_.node(node).parent).id, length = mirror_.node(node).length;
    return node;
  }

  // The node below `parent` that starts with `head`; kRootId if there is none.
  int64_t child(int64_t parent, Head head) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int32_t node = mirror_.child(mirror_.known(parent), head);
    return node == kNone ? kRootId : mirror_.node(node).id;
  }

  int32_t any_request(int64_t node) {
    std::lock_guard<std::mutex> lock(mutex_);
    return mirror_.any_request(mirror_.known(node));
  }

  void prune(int64_t node) {
    std::lock_guard<std::mutex> lock(mutex_);
    mirror_.prune(mirror_.find(node));
  }

  // (node, row, where its path ends) of a bound request.
  void binding(int32_t request, int64_t& node, int64_t& row, int64_t& end) {
    std::lock_guard<std::mutex> lock(mutex_);
    check(request);
    const Request& r = mirror_.request(request);
    node = mirror_.node(r.node).id, row = r.row, end = mirror_.node(r.node).end();
  }

  // The batch expected next.

  void set_batch(const int32_t* requests, int64_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int64_t i = 0; i < size; ++i)
      if (requests[i] != kNone) check(requests[i]);
    for (const int32_t request : batch_)
      if (request != kNone) mirror_.request(request).position = kNone;
    batch_.clear();
    seq_lens_.clear();
    told_ = 0;
    ++version_;
    for (int64_t i = 0; i < size; ++i) append(requests[i], 1);
  }

  // A request joins at the end; `length` is its tokens, as far as they are known.
  // Returns false where the request is in the batch already, which takes over its length.
  bool join(int32_t request, int64_t length) {
    std::lock_guard<std::mutex> lock(mutex_);
    check(request);
    const int32_t position = mirror_.request(request).position;
    if (position != kNone) {
      grow(position, length);
      return false;
    }
    append(request, length);
    ++version_;
    return true;
  }

  // A request that has no path yet is expected at `position` with `length` tokens; behind all others if it joins.
  void expect(int64_t position, int64_t length) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (position != int64_t(batch_.size())) return grow(position, length);
    append(kNone, length);
    ++version_;
  }

  // The request at `position`, which had no path, has got one.
  void adopt(int64_t position, int32_t request) {
    std::lock_guard<std::mutex> lock(mutex_);
    check(request);
    if (batch_.at(position) != kNone) throw Inconsistent("two requests at one place of the batch");
    batch_[position] = request;
    mirror_.request(request).position = int32_t(position);
    mirror_.request(request).counted = size_t(position) < told_;
    ++version_;
  }

  // The request at `position`, which has no path, leaves.
  void drop(int64_t position) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (batch_.at(position) != kNone) throw Inconsistent("a request with a path leaves when it is released");
    erase(int32_t(position));
    ++version_;
  }

  // Let the planning thread make the next plan; the batch has run `steps` steps since its lengths were last told.
  void prepare(int64_t steps) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
      steps_ahead_ = steps;
      wanted_ = true;
    }
    wake_.notify_one();
  }

  // The plan for the batch, whose requests now have `seq_lens` tokens: the one made ahead if it is for this very batch,
  // else made now. The plan before it ran `steps` steps. Throws TooLarge.
  Taken take(const int64_t* seq_lens, int64_t size, int64_t steps) {
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = false;
    idle_.wait(lock, [this] { return !planning_; });
    if (size != int64_t(batch_.size())) throw std::invalid_argument("as many lengths as requests are needed");
    retire(steps);
    const bool ahead = ready_ && ready_version_ == version_ && fits(seq_lens);
    std::copy(seq_lens, seq_lens + size, seq_lens_.begin());
    count_new();
    told_ = batch_.size();
    ready_ = false;
    if (!ahead) {
      delta_ = 0;
      maker_.copy(mirror_, batch_, seq_lens_, 0, 0);
      maker_.plan(config_, config_.policy, buffers_[back()], max_slots_, plans_[back()]);
    }
    hand_out();
    return Taken{front_, ahead, buffers_[front_].data[kSteps] - delta_};
  }

  // One query per work item, for when there is no plan to be had.
  Taken fall_back(const int64_t* seq_lens, int64_t size, int64_t steps) {
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = false;
    idle_.wait(lock, [this] { return !planning_; });
    retire(steps);
    ready_ = false;
    fallback_lens_.assign(seq_lens, seq_lens + size);
    fallback_batch_.assign(size, kNone);
    maker_.copy(mirror_, fallback_batch_, fallback_lens_, 0, 0);
    Config whole = config_;
    whole.workers = 1;  // nothing is cut, so that no workspace is needed
    maker_.plan(whole, Policy::kQuery, buffers_[back()], max_slots_, plans_[back()]);
    hand_out();
    buffers_[front_].data[kSteps] = 0;
    return Taken{front_, false, 0};
  }

  // Counts up to now, the current plan having run `steps` steps.
  Totals totals(int64_t steps) {
    std::lock_guard<std::mutex> lock(mutex_);
    Totals totals = totals_;
    add(totals, steps);
    return totals;
  }

  const Statistics& current() const { return plans_[front_]; }
  void set_delays(Delays delays) {
    std::lock_guard<std::mutex> lock(mutex_);
    delays_ = delays;
  }
  int64_t version() const { return version_; }
  size_t active_nodes() const { return mirror_.active_nodes(); }

  size_t bytes() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return !planning_; });
    return mirror_.bytes() + maker_.bytes();
  }

 private:
  void check(int32_t request) const {
    if (!mirror_.is_bound(request)) throw Inconsistent("request " + std::to_string(request) + " is not bound");
  }

  void append(int32_t request, int64_t length) {
    if (request != kNone) {
      check(request);
      mirror_.request(request).position = int32_t(batch_.size());
    }
    batch_.push_back(request);
    seq_lens_.push_back(int32_t(length));
  }

  // Another chunk of a prompt. Of requests that decode already `take` knows better.
  void grow(int64_t position, int64_t length) {
    int32_t& known = seq_lens_.at(position);
    if (size_t(position) < told_ || known == length) return;
    known = int32_t(length);
    ++version_;
  }

  // A request loses its path, or leaves the batch altogether. Returns where it was, kNone if it was not there.
  int32_t leave(int32_t request, bool stays) {
    const int32_t position = std::exchange(mirror_.request(request).position, kNone);
    if (position == kNone) return kNone;
    ++version_;
    if (stays)
      batch_[position] = kNone;
    else
      erase(position);
    return position;
  }

  void erase(int32_t position) {
    batch_.erase(batch_.begin() + position);
    seq_lens_.erase(seq_lens_.begin() + position);
    told_ -= size_t(position) < told_;
    for (size_t i = position; i < batch_.size(); ++i)
      if (batch_[i] != kNone) mirror_.request(batch_[i]).position = int32_t(i);
  }

  // Count the requests that decode for the first time.
  void count_new() {
    for (size_t i = told_; i < batch_.size(); ++i) {
      const bool known = batch_[i] != kNone;
      if (known && mirror_.request(batch_[i]).counted) continue;
      if (known) mirror_.request(batch_[i]).counted = true;
      ++totals_.requests;
    }
  }

  int back() const { return (front_ + 1) % int(buffers_.size()); }

  void hand_out() {
    front_ = back();
    in_use_ = true;
  }

  // The plan in use has run `steps` steps and will run no more.
  void retire(int64_t steps) {
    add(totals_, steps);
    in_use_ = false;
  }

  // A plan made from shorter lengths is right as long as nothing has become shorter, and even as long as everything has
  // become longer alike; how much longer, it stays good for that many steps less.
  bool fits(const int64_t* seq_lens) {
    const std::vector<int32_t>& made_for = maker_.seq_lens();
    int64_t least = INT64_MAX;
    delta_ = 0;
    for (size_t i = 0; i < made_for.size(); ++i) {
      const int64_t longer = seq_lens[i] - made_for[i];
      least = std::min(least, longer);
      delta_ = std::max(delta_, longer);
    }
    if (least < 0 || delta_ - least > PlanWriter::kLeastSteps) return false;
    return delta_ == 0 || delta_ < buffers_[back()].data[kSteps] / 2;
  }

  void add(Totals& totals, int64_t steps) const {
    if (!in_use_) return;
    const Statistics& plan = plans_[front_];
    // Every step each request, and with it every open work item, has one token more.
    const int64_t grown = steps * (steps - 1) / 2;
    Statistics& sum = totals.statistics;
    totals.steps += steps;
    sum.items += steps * plan.items;
    sum.parts += steps * plan.parts;
    sum.kv_tokens += steps * plan.kv_tokens + grown * plan.open_items;
    sum.seq_tokens += steps * plan.seq_tokens + grown * plan.open_items;
    for (size_t i = 0; i < plan.query_sizes.size(); ++i) sum.query_sizes[i] += steps * plan.query_sizes[i];
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stop_ || wanted_; });
      if (stop_) return;
      pause(lock, delays_.before_copy);
      if (!wanted_) continue;  // taken meanwhile
      wanted_ = false;
      if (batch_.empty()) continue;
      planning_ = true;
      ready_ = false;
      const int64_t version = version_;
      const int next = back();
      maker_.copy(mirror_, batch_, seq_lens_, told_, steps_ahead_);
      const int64_t delay = delays_.before_publish;
      lock.unlock();
      bool made = true;
      try {
        maker_.plan(config_, config_.policy, buffers_[next], max_slots_, plans_[next]);
      } catch (const std::exception&) {
        made = false;  // `take` plans again and reports
      }
      if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
      lock.lock();
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
  std::vector<int32_t> batch_, seq_lens_;
  size_t told_ = 0;  // requests whose lengths `take` was told; those that joined since have their first ones
  int64_t version_ = 0;

  PlanMaker maker_;  // used under the mutex, or by the planning thread while `planning_`
  bool wanted_ = false, planning_ = false, ready_ = false, stop_ = false;
  int64_t ready_version_ = 0, steps_ahead_ = 0, delta_ = 0;
  Delays delays_;

  std::vector<Statistics> plans_;  // of each buffer, written with it
  int front_ = 0;
  bool in_use_ = false;
  Totals totals_;
  std::vector<int32_t> fallback_batch_, fallback_lens_;
};

}  // namespace pat
