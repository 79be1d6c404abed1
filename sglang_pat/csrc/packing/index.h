// Finds nodes by a key that they hold themselves: open addressing, four bytes a slot. Only `make_room` allocates.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pat {

template <typename HashOf>  // HashOf(int32_t element) -> uint64_t
class Index {
 public:
  explicit Index(HashOf hash_of) : hash_of_(hash_of), slots_(64, kEmpty) {}

  // Matches(int32_t element) -> bool
  template <typename Matches>
  int32_t find(uint64_t hash, Matches matches) const {
    for (size_t slot = hash & mask();; slot = (slot + 1) & mask()) {
      if (slots_[slot] == kEmpty || matches(slots_[slot])) return slots_[slot];
    }
  }

  // For one element more. If memory runs out, nothing has changed.
  void make_room() {
    if ((size_ + 1) * 2 > slots_.size()) grow();
  }

  // There must be room.
  void insert(int32_t element) {
    ++size_;
    place(element);
  }

  void erase(int32_t element) {
    size_t hole = hash_of_(element) & mask();
    for (; slots_[hole] != element; hole = (hole + 1) & mask())
      if (slots_[hole] == kEmpty) return;
    --size_;
    // What follows without a gap may have been pushed here by a collision: move it back.
    for (size_t slot = (hole + 1) & mask(); slots_[slot] != kEmpty; slot = (slot + 1) & mask()) {
      const size_t home = hash_of_(slots_[slot]) & mask();
      if (((slot - home) & mask()) >= ((slot - hole) & mask())) {
        slots_[hole] = slots_[slot];
        hole = slot;
      }
    }
    slots_[hole] = kEmpty;
  }

  void clear() {
    std::fill(slots_.begin(), slots_.end(), kEmpty);
    size_ = 0;
  }

  size_t bytes() const { return slots_.capacity() * sizeof(int32_t); }

 private:
  static constexpr int32_t kEmpty = -1;

  size_t mask() const { return slots_.size() - 1; }

  void place(int32_t element) {
    size_t slot = hash_of_(element) & mask();
    while (slots_[slot] != kEmpty) slot = (slot + 1) & mask();
    slots_[slot] = element;
  }

  void grow() {
    std::vector<int32_t> old(slots_.size() * 2, kEmpty);
    old.swap(slots_);
    for (int32_t element : old)
      if (element != kEmpty) place(element);
  }

  HashOf hash_of_;
  std::vector<int32_t> slots_;
  size_t size_ = 0;
};

// The finalizer of splitmix64: SGLang's node ids are consecutive, slots shall not be.
inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace pat
