// The batch expected next: who is in it, in which order, and how long its requests are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "mirror.h"

namespace pat {

// Requests are named by keys (mirror.h). One of which the mirror knows nothing may be in the batch, and is kNone in `requests`. Of a key that
// is there twice nothing is known the second time. As in the mirror, what allocates does so before it changes anything.
class Expected {
 public:
  explicit Expected(Mirror& mirror) : mirror_(mirror) {}

  void reserve(size_t count) {
    keys_.reserve(count);
    requests_.reserve(count);
    seq_lens_.reserve(count);
  }

  size_t size() const { return keys_.size(); }
  const std::vector<int64_t>& keys() const { return keys_; }
  const std::vector<int32_t>& requests() const { return requests_; }
  const std::vector<int32_t>& seq_lens() const { return seq_lens_; }
  // So many of the requests, the first ones, have the lengths that `tell` said; the others those that they joined with.
  size_t told() const { return told_; }

  // Changes with the batch, and with the path of one of its requests.
  int64_t version() const { return version_; }
  void path_changed(int32_t request) { version_ += mirror_.request(request).position != kNone; }
  void all_paths_changed() { ++version_; }

  bool is(const int64_t* keys, int64_t size) const {
    return size == int64_t(keys_.size()) && std::equal(keys_.begin(), keys_.end(), keys);
  }

  // Another batch, whatever was expected.
  void assign(const int64_t* keys, int64_t size) {
    reserve(size);
    for (const int32_t request : requests_)
      if (request != kNone) mirror_.request(request).position = kNone;
    keys_.assign(keys, keys + size);
    requests_.assign(size, kNone);
    seq_lens_.assign(size, 1);
    told_ = 0;
    ++version_;
    for (int32_t i = 0; i < int32_t(size); ++i) {
      const int32_t request = mirror_.find_request(keys[i]);
      if (request != kNone && mirror_.request(request).position == kNone) take_place(request, i);
    }
  }

  // Puts the batch back as it was, if `keeps`, when the scope is left. There is still room for it.
  class Kept {
   public:
    Kept(Expected& expected, bool keeps) : expected_(expected), keeps_(keeps) {
      if (keeps) keys_ = expected.keys_, seq_lens_ = expected.seq_lens_, told_ = expected.told_;
    }
    ~Kept() {
      if (!keeps_) return;
      expected_.assign(keys_.data(), int64_t(keys_.size()));
      expected_.seq_lens_ = std::move(seq_lens_), expected_.told_ = told_;
    }
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;

   private:
    Expected& expected_;
    const bool keeps_;
    std::vector<int64_t> keys_;
    std::vector<int32_t> seq_lens_;
    size_t told_ = 0;
  };

  // The fewest tokens that a request gained whose length was told; 0 if there is none, or if one has become shorter.
  int64_t gained(const int64_t* seq_lens) const {
    int64_t least = told_ > 0 ? INT64_MAX : 0;
    for (size_t i = 0; i < told_; ++i) least = std::min(least, seq_lens[i] - seq_lens_[i]);
    return std::max<int64_t>(least, 0);
  }

  // The lengths of all requests, which decode now. Returns how many of them decode for the first time.
  int64_t tell(const int64_t* seq_lens) {
    std::copy(seq_lens, seq_lens + size(), seq_lens_.begin());
    int64_t first = 0;
    for (size_t i = told_; i < size(); ++i)
      if (requests_[i] != kNone) first += !std::exchange(mirror_.request(requests_[i]).counted, true);
    told_ = size();
    return first;
  }

  // For `join`.
  void make_room() {
    pat::make_room(keys_);
    pat::make_room(requests_);
    pat::make_room(seq_lens_);
  }

  // The request joins behind all others, where there must be room. If it is there already, `length` is that of another chunk
  // of its prompt, or leaves out a draft that was counted before; where it decodes, `tell` knows better.
  void join(int32_t request, int64_t key, int64_t length) {
    const int32_t position = mirror_.request(request).position;
    if (position == kNone) {
      keys_.push_back(key);
      requests_.push_back(kNone);
      seq_lens_.push_back(int32_t(length));
      take_place(request, int32_t(size()) - 1);
    } else {
      int32_t& known = seq_lens_.at(position);
      if (size_t(position) < told_ || known >= length) return;
      known = int32_t(length);
    }
    ++version_;
  }

  void leave(int64_t key) {
    const int32_t request = mirror_.find_request(key);
    const int32_t position = request == kNone ? position_of(key) : std::exchange(mirror_.request(request).position, kNone);
    if (position == kNone) return;
    ++version_;
    keys_.erase(keys_.begin() + position);
    requests_.erase(requests_.begin() + position);
    seq_lens_.erase(seq_lens_.begin() + position);
    told_ -= size_t(position) < told_;
    for (size_t i = position; i < requests_.size(); ++i)
      if (requests_[i] != kNone) mirror_.request(requests_[i]).position = int32_t(i);
  }

  // A request that the mirror knows, and the node where the one hung that had its row before: it is still there, to be pruned.
  struct Entered {
    int32_t request, orphan;
  };

  // The request `key`, which the mirror need not know yet. A row has one request: whoever had it before is forgotten, and leaves.
  Entered enter(int64_t key) {
    const int32_t before = mirror_.at_row(key);
    if (before != kNone && mirror_.request(before).key == key) return {before, kRoot};
    int32_t orphan = kRoot;
    if (before != kNone) {
      leave(mirror_.request(before).key);
      orphan = mirror_.remove(before);
    }
    const int32_t request = mirror_.enter(key), position = position_of(key);
    if (position != kNone) take_place(request, position);
    return {request, orphan};
  }

 private:
  int32_t position_of(int64_t key) const {
    const auto at = std::find(keys_.begin(), keys_.end(), key);
    return at == keys_.end() ? kNone : int32_t(at - keys_.begin());
  }

  void take_place(int32_t request, int32_t position) {
    requests_[position] = request;
    mirror_.request(request).position = position;
  }

  Mirror& mirror_;
  std::vector<int64_t> keys_;
  std::vector<int32_t> requests_, seq_lens_;
  size_t told_ = 0;
  int64_t version_ = 0;
};

}  // namespace pat
