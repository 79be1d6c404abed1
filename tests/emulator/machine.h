// One CTA at a time of a CUDA kernel that a host compiler has compiled. Each of its threads has a stack of its own, and where
// it waits for others another one goes on, chosen at random; some warps are mostly overtaken. What the hardware may do late,
// this does as late as it may, or at once, by chance: copies, arrivals and products. Until then their destination is NaN.
#pragma once

#include <sys/mman.h>

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
constexpr int kTries = 31;                // to find a thread that is not lazy; a power of two, less one
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
  Machine();
  ~Machine();

  // Runs the CTA `block` of `grid`, whose shared memory is `shared`.
  void run(const std::function<void()>& kernel, unsigned block, unsigned grid, unsigned threads, uint8_t* shared,
           uint64_t seed);

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
  [[noreturn]] void fail(const char* message);

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
  int sync(int id, int expected, bool value = false);

  // Arrives there without waiting.
  void arrive_named(int id, int expected);

  // This thread's registers from now on: it gives some back, or waits until as many are there.
  void set_registers(int count, bool more);

  // The same for the whole CTA.
  int sync_all(bool value = false) { return sync(0, int(size_), value); }

  void init_barrier(uint32_t at, int arrivals);
  void invalidate_barrier(uint32_t at);
  void arrive(uint32_t at, int count = 1);
  void wait_barrier(uint32_t at, int phase);
  void copy(uint32_t to, const void* from, int bytes = 16);
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
  void commit_copies();
  void arrive_after_copies(uint32_t at);
  void wait_copies(int groups);

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
  void enter(Thread& thread);
  static void begin(unsigned high, unsigned low);
  [[noreturn]] void end();

  // Whether all of kTries threads, chosen at random from those that can go on, are lazy.
  bool next_is_lazy();

  void wait();
  void wake(std::vector<Thread*>& threads);
  MemoryBarrier read_barrier(uint32_t at);
  void finish(const Pending& one);
  void ask(const Pending& one);
  void finish_first(Thread& thread);

  // Goes on with some thread's copies; false if there are none.
  bool advance();

  std::string whereabouts() const;

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

// Runs all CTAs of a kernel, several at a time and in a random order; returns what went wrong, if anything. `shared` says
// where the host's thread that asks has shared memory for a CTA.
std::string launch(const std::function<void()>& kernel, unsigned grid, unsigned threads, uint64_t seed,
                   uint8_t* (*shared)());

}  // namespace emulator
