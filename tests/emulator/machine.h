// One CTA at a time of a CUDA kernel that a host compiler has compiled. Each of its threads has a stack of its own, and where
// it waits for others another one goes on, chosen at random; some warps are mostly overtaken. What the hardware may do late,
// this does as late as it may, or at once, by chance: copies, arrivals and products. Until then their destination is NaN.
#pragma once

#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "state.h"

namespace emulator {

constexpr int kNamedBarriers = 16;
constexpr unsigned kSmRegisters = 65536;  // which all threads of a CTA have when it starts
constexpr int kTries = 31;                // to find a thread that is not lazy
constexpr size_t kStackBytes = 256 << 10, kSharedBytes = 227 << 10;

// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), which also says the constants.
// std::mt19937_64 and a division for each number took longer.
class Random {
 public:
  void seed(uint64_t seed) { state_ = seed; }
  // A number below `n`.
  uint64_t below(uint64_t n) {
    uint64_t x = state_ += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return uint64_t((unsigned __int128)(x ^ x >> 31) * n >> 64);
  }

 private:
  uint64_t state_ = 0;
};

class Machine {
 public:
  // Runs the CTA `block` of `grid`, whose shared memory is `shared`.
  void run(const std::function<void()>& kernel, unsigned block, unsigned grid, unsigned threads, uint8_t* shared,
           uint64_t seed) {
    shared_ = shared;
    std::memset(shared, 0xff, kSharedBytes);
    random_.seed(seed);
    kernel_ = &kernel;
    block_ = block, grid_ = grid, size_ = threads;
    alive_ = int(threads);
    error_.clear();
    for (auto& threads : ready_) threads.clear();
    waiting_.clear();
    fence();
    for_registers_.clear();
    free_registers_ = 0;
    while (stacks_.size() < threads) stacks_.push_back(std::make_unique<Stack>());
    threads_ = std::vector<Thread>(threads);
    asking_.assign((threads + 63) / 64, 0);
    warps_ = std::vector<Warp>(threads / kWarpSize);
    for (Warp& warp : warps_) warp.products.emplace_back();
    named_ = std::vector<NamedBarrier>(kNamedBarriers);
    bool all_lazy = false, lazy = false;
    for (unsigned i = 0; i < threads; ++i) {
      if (i % (4 * kWarpSize) == 0) all_lazy = chance(4);
      if (i % kWarpSize == 0) lazy = all_lazy || chance(8);
      threads_[i].index = i;
      threads_[i].lazy = lazy;
      threads_[i].registers = int(kSmRegisters / threads / 8 * 8);
      ready_[lazy].push_back(&threads_[i]);
    }
    while (alive_ > 0 && error_.empty()) {
      if (ready_[0].empty() && ready_[1].empty()) {
        if (!advance()) error_ = "every thread waits for another one: " + whereabouts();
        continue;
      }
      if (chance(8)) advance();
      auto& threads = ready_[next_is_lazy()];
      std::swap(threads[random_.below(threads.size())], threads.back());
      Thread* thread = threads.back();
      threads.pop_back();
      enter(*thread);
    }
    for (Warp& warp : warps_)
      if (error_.empty() && (warp.products.size() > 1 || !warp.products.back().empty()))
        error_ = "a warp ended with products in flight";
    if (!error_.empty()) throw std::runtime_error("CTA " + std::to_string(block) + ": " + error_);
  }

  Thread& current() { return *current_; }
  unsigned block() const { return block_; }
  unsigned grid() const { return grid_; }
  uint8_t* shared(uint32_t address, uint32_t bytes) {
    if (address % bytes != 0) fail("a misaligned address in shared memory");
    if (address + bytes > kSharedBytes) fail("an address beyond shared memory");
    return shared_ + address;
  }
  uint32_t address(const void* pointer) {
    const ptrdiff_t offset = static_cast<const uint8_t*>(pointer) - shared_;
    if (offset < 0 || offset >= ptrdiff_t(kSharedBytes)) fail("a pointer that is not to shared memory");
    return uint32_t(offset);
  }

  // Ends the CTA.
  [[noreturn]] void fail(const std::string& message) {
    error_ = message + " (thread " + std::to_string(current_->index) + ")";
    _longjmp(scheduler_, 1);
  }

  // An instruction that a warp executes together: `all` makes every lane's result of what all lanes gave.
  template <typename Out, typename In, typename All>
  Out together(const In& in, All all) {
    static const char instruction = 0;  // one for each place in the source
    static_assert(sizeof(In) <= sizeof(Warp::in[0]) && sizeof(Out) <= sizeof(Warp::out[0]));
    Thread& thread = current();
    Warp& warp = warps_[thread.warp()];
    if (warp.arrived > 0 && warp.instruction != &instruction) fail("lanes of a warp execute different instructions");
    warp.instruction = &instruction;
    std::memcpy(warp.in[thread.lane()], &in, sizeof(In));
    if (++warp.arrived < kWarpSize) {
      warp.waiting.push_back(&thread);
      wait();
    } else {
      In ins[kWarpSize];
      Out outs[kWarpSize];
      for (int i = 0; i < kWarpSize; ++i) std::memcpy(&ins[i], warp.in[i], sizeof(In));
      all(ins, outs);
      for (int i = 0; i < kWarpSize; ++i) std::memcpy(warp.out[i], &outs[i], sizeof(Out));
      warp.arrived = 0;
      wake(warp.waiting);
    }
    Out out;
    std::memcpy(&out, warp.out[thread.lane()], sizeof(Out));
    return out;
  }

  // Waits for `expected` threads at a named barrier; for how many of them `value` is true.
  int sync(int id, int expected, bool value = false) {
    if (id < 0 || id >= kNamedBarriers) fail("there are 16 named barriers");
    NamedBarrier& barrier = named_[id];
    if (barrier.arrived > 0 && barrier.expected != expected) fail("a barrier with two numbers of threads");
    barrier.expected = expected;
    barrier.count += value;
    current_->met = true;
    if (++barrier.arrived < expected) {
      barrier.waiting.push_back(current_);
      wait();
    } else {
      barrier.result = barrier.count;
      barrier.arrived = barrier.count = 0;
      wake(barrier.waiting);
    }
    return barrier.result;
  }

  // Arrives there without waiting.
  void arrive_named(int id, int expected) {
    NamedBarrier& barrier = named_[id];
    if (barrier.arrived > 0 && barrier.expected != expected) fail("a barrier with two numbers of threads");
    barrier.expected = expected;
    if (++barrier.arrived < expected) return;
    barrier.result = barrier.count;
    barrier.arrived = barrier.count = 0;
    wake(barrier.waiting);
  }

  // This thread's registers from now on: it gives some back, or waits until as many are there.
  void set_registers(int count, bool more) {
    int& own = current_->registers;
    if (more ? count < own : count > own) fail("registers grow to fewer, or shrink to more");
    if (!current_->met) fail("registers change twice and no barrier is between");
    current_->met = false;
    while (free_registers_ < count - own) {
      for_registers_.push_back(current_);
      wait();
    }
    free_registers_ += own - count;
    own = count;
    wake(for_registers_);
  }

  // The same for the whole CTA.
  int sync_all(bool value = false) { return sync(0, int(size_), value); }

  void init_barrier(uint32_t at, int arrivals) {
    const MemoryBarrier barrier{uint32_t(arrivals), 0, uint32_t(arrivals)};
    std::memcpy(shared(at, 8), &barrier, 8);
  }

  void invalidate_barrier(uint32_t at) {
    read_barrier(at);
    if (!waiting_[at].empty()) fail("a barrier is invalidated at which threads wait");
    std::memset(shared(at, 8), 0xff, 8);
  }

  void arrive(uint32_t at, int count = 1) {
    MemoryBarrier barrier = read_barrier(at);
    if (count > int(barrier.missing)) fail("more threads arrive at a barrier than it expects");
    if ((barrier.missing -= count) == 0) {
      barrier.phase ^= 1, barrier.missing = barrier.expected;
      wake(waiting_[at]);
    }
    std::memcpy(shared(at, 8), &barrier, 8);
  }

  void wait_barrier(uint32_t at, int phase) {
    while (int(read_barrier(at).phase) == phase) {
      waiting_[at].push_back(current_);
      wait();
    }
  }

  void copy(uint32_t to, const void* from, int bytes = 16) {
    shared(to, bytes);
    if (reinterpret_cast<uintptr_t>(from) % bytes != 0) fail("a copy from a misaligned address");
    if (chance(2)) return finish({Pending::kCopy, to, from, bytes});
    std::memset(shared(to, bytes), 0xff, bytes);
    ask({Pending::kCopy, to, from, bytes});
  }
  // Products see what has been copied or stored only behind a fence, whoever executes it.
  void fence() { ++fences_; }
  // Where 16 bytes are written.
  uint8_t* written(uint32_t address) {
    written_[address / 16] = fences_;
    return shared(address, 16);
  }
  // What a product reads.
  uint8_t* shown(uint32_t address) {
    uint8_t* const there = shared(address, 16);
    if (written_[address / 16] == fences_) fail("a product reads in front of a fence what was written");
    return there;
  }
  void commit_copies() { ask({Pending::kCommit}); }
  void arrive_after_copies(uint32_t at) { ask({Pending::kArrive, at}); }
  void wait_copies(int groups) {
    auto& pending = current_->pending;
    int committed = 0;
    for (const Pending& one : pending) committed += one.kind == Pending::kCommit;
    while (committed > groups) {
      committed -= pending.front().kind == Pending::kCommit;
      finish_first(*current_);
    }
  }

  // This warp's products in flight, in groups.
  auto& products() { return warps_[current_->warp()].products; }

  // Whether something happens that has one chance in `n`.
  bool chance(unsigned n) { return random_.below(n) == 0; }

 private:
  struct Stack {
    Stack() : memory(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
      if (memory == MAP_FAILED) throw std::bad_alloc();
    }
    ~Stack() { munmap(memory, kStackBytes); }
    void* memory;
  };

  // On with a thread, until it waits or ends.
  void enter(Thread& thread) {
    current_ = &thread;
    if (_setjmp(scheduler_) != 0) return;
    if (thread.started) _longjmp(thread.at, 1);
    thread.started = true;
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = stacks_[thread.index]->memory;
    thread.start.uc_stack.ss_size = kStackBytes;
    const uintptr_t self = reinterpret_cast<uintptr_t>(this);
    makecontext(&thread.start, reinterpret_cast<void (*)()>(&begin), 2, unsigned(self >> 32), unsigned(self));
    setcontext(&thread.start);
  }

  static void begin(unsigned high, unsigned low) {
    Machine& machine = *reinterpret_cast<Machine*>(uintptr_t(high) << 32 | low);
    (*machine.kernel_)();
    machine.end();
  }

  [[noreturn]] void end() {
    while (!current_->pending.empty()) finish_first(*current_);
    --alive_;
    _longjmp(scheduler_, 1);
  }

  // Whether all of kTries threads, chosen at random from those that can go on, are lazy.
  bool next_is_lazy() {
    const size_t eager = ready_[0].size(), lazy = ready_[1].size();
    if (eager == 0 || lazy == 0) return eager == 0;
    constexpr int kSteps = 1 << 24;
    return float(random_.below(kSteps)) < kSteps * std::pow(float(lazy) / float(eager + lazy), kTries);
  }

  void wait() {
    if (_setjmp(current_->at) == 0) _longjmp(scheduler_, 1);
  }

  void wake(std::vector<Thread*>& threads) {
    for (Thread* thread : threads) ready_[thread->lazy].push_back(thread);
    threads.clear();
  }

  MemoryBarrier read_barrier(uint32_t at) {
    MemoryBarrier barrier;
    std::memcpy(&barrier, shared(at, 8), 8);
    return barrier;
  }

  void finish(const Pending& one) {
    if (one.kind == Pending::kArrive) arrive(one.to);
    if (one.kind != Pending::kCopy) return;
    written_[one.to / 16] = fences_;
    if (one.from == nullptr)
      std::memset(shared(one.to, one.bytes), 0, one.bytes);
    else
      std::memcpy(shared(one.to, one.bytes), one.from, one.bytes);
  }

  void ask(const Pending& one) {
    current_->pending.push_back(one);
    asking_[current_->index / 64] |= uint64_t(1) << current_->index % 64;
  }

  void finish_first(Thread& thread) {
    const Pending one = thread.pending.front();
    thread.pending.pop_front();
    if (thread.pending.empty()) asking_[thread.index / 64] &= ~(uint64_t(1) << thread.index % 64);
    finish(one);
  }

  // Goes on with some thread's copies; false if there are none.
  bool advance() {
    const size_t first = random_.below(threads_.size());
    // From that one on, then those in front of it.
    for (size_t i = 0; i <= asking_.size(); ++i) {
      const size_t word = (first / 64 + i) % asking_.size();
      uint64_t bits = asking_[word];
      if (i == 0) bits &= ~uint64_t(0) << first % 64;
      if (bits == 0) continue;
      finish_first(threads_[64 * word + __builtin_ctzll(bits)]);
      return true;
    }
    return false;
  }

  std::string whereabouts() const {
    std::string text;
    for (int id = 0; id < kNamedBarriers; ++id)
      if (named_[id].arrived > 0)
        text += std::to_string(named_[id].arrived) + " of " + std::to_string(named_[id].expected) + " at barrier " +
                std::to_string(id) + ", ";
    for (const auto& [at, threads] : waiting_)
      if (!threads.empty())
        text += std::to_string(threads.size()) + " at the barrier in shared memory at " + std::to_string(at) + ", ";
    if (!for_registers_.empty()) text += std::to_string(for_registers_.size()) + " for registers, ";
    int lanes = 0;
    for (const Warp& warp : warps_) lanes += warp.arrived;
    return text + std::to_string(lanes) + " for others of their warp";
  }

  uint8_t* shared_ = nullptr;
  Random random_;
  const std::function<void()>* kernel_ = nullptr;
  unsigned block_ = 0, grid_ = 0, size_ = 0;
  int alive_ = 0;
  std::string error_;
  jmp_buf scheduler_;
  Thread* current_ = nullptr;
  std::vector<std::unique_ptr<Stack>> stacks_;
  std::vector<Thread> threads_;
  std::vector<uint64_t> asking_;   // a bit for each thread that has something pending
  std::vector<Thread*> ready_[2];  // those that are not lazy, and those that are
  std::vector<Warp> warps_;
  std::vector<NamedBarrier> named_;
  std::vector<Thread*> for_registers_;  // that wait for some
  int free_registers_ = 0;
  std::unordered_map<uint32_t, std::vector<Thread*>> waiting_;
  uint64_t fences_ = 1;
  uint64_t written_[kSharedBytes / 16] = {};  // of 16 bytes of shared memory each: fences before they were
};

inline thread_local Machine* machine = nullptr;

}  // namespace emulator
