// What a machine does that needs no place in a kernel: compiled once, for all modules (emulated.py).
#include "machine.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

namespace emulator {

namespace {

// Machines, whose threads' stacks take long to get, for the next kernel.
class Machines {
 public:
  std::unique_ptr<Machine> take() {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (free_.empty()) return std::make_unique<Machine>();
    auto machine = std::move(free_.back());
    free_.pop_back();
    return machine;
  }
  void give_back(std::unique_ptr<Machine> machine) {
    const std::lock_guard<std::mutex> guard(mutex_);
    free_.push_back(std::move(machine));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Machine>> free_;
} machines;

}  // namespace

Machine::Machine() = default;
Machine::~Machine() = default;

void Machine::run(const std::function<void()>& kernel, unsigned block, unsigned grid, unsigned threads, uint8_t* shared,
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

void Machine::fail(const char* message) {
  error_ = std::string(message) + " (thread " + std::to_string(current_->index) + ")";
  _longjmp(scheduler_, 1);
}

int Machine::sync(int id, int expected, bool value) {
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

void Machine::arrive_named(int id, int expected) {
  NamedBarrier& barrier = named_[id];
  if (barrier.arrived > 0 && barrier.expected != expected) fail("a barrier with two numbers of threads");
  barrier.expected = expected;
  if (++barrier.arrived < expected) return;
  barrier.result = barrier.count;
  barrier.arrived = barrier.count = 0;
  wake(barrier.waiting);
}

void Machine::set_registers(int count, bool more) {
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

void Machine::init_barrier(uint32_t at, int arrivals) {
  const MemoryBarrier barrier{uint32_t(arrivals), 0, uint32_t(arrivals)};
  std::memcpy(shared(at, 8), &barrier, 8);
}

void Machine::invalidate_barrier(uint32_t at) {
  read_barrier(at);
  if (!waiting_[at].empty()) fail("a barrier is invalidated at which threads wait");
  std::memset(shared(at, 8), 0xff, 8);
}

void Machine::wait_barrier(uint32_t at, int phase) {
  while (int(read_barrier(at).phase) == phase) {
    waiting_[at].push_back(current_);
    wait();
  }
}

void Machine::wait_copies(int groups) {
  auto& pending = current_->pending;
  int committed = 0;
  for (const Pending& one : pending) committed += one.kind == Pending::kCommit;
  while (committed > groups) {
    committed -= pending.front().kind == Pending::kCommit;
    finish_first(*current_);
  }
}

void Machine::arrive(uint32_t at, int count) {
  MemoryBarrier barrier = read_barrier(at);
  if (count > int(barrier.missing)) fail("more threads arrive at a barrier than it expects");
  if ((barrier.missing -= count) == 0) {
    barrier.phase ^= 1, barrier.missing = barrier.expected;
    wake(waiting_[at]);
  }
  std::memcpy(shared(at, 8), &barrier, 8);
}

void Machine::copy(uint32_t to, const void* from, int bytes) {
  shared(to, bytes);
  if (reinterpret_cast<uintptr_t>(from) % bytes != 0) fail("a copy from a misaligned address");
  if (chance(2)) return finish({Pending::kCopy, to, from, bytes});
  std::memset(shared(to, bytes), 0xff, bytes);
  ask({Pending::kCopy, to, from, bytes});
}

void Machine::commit_copies() { ask({Pending::kCommit}); }

void Machine::arrive_after_copies(uint32_t at) { ask({Pending::kArrive, at}); }

void Machine::enter(Thread& thread) {
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

void Machine::wait() {
  if (_setjmp(current_->at) == 0) _longjmp(scheduler_, 1);
}

void Machine::wake(std::vector<Thread*>& threads) {
  for (Thread* thread : threads) ready_[thread->lazy].push_back(thread);
  threads.clear();
}

MemoryBarrier Machine::read_barrier(uint32_t at) {
  MemoryBarrier barrier;
  std::memcpy(&barrier, shared(at, 8), 8);
  return barrier;
}

void Machine::finish(const Pending& one) {
  if (one.kind == Pending::kArrive) arrive(one.to);
  if (one.kind != Pending::kCopy) return;
  written_[one.to / 16] = fences_;
  if (one.from == nullptr)
    std::memset(shared(one.to, one.bytes), 0, one.bytes);
  else
    std::memcpy(shared(one.to, one.bytes), one.from, one.bytes);
}

void Machine::ask(const Pending& one) {
  current_->pending.push_back(one);
  asking_[current_->index / 64] |= uint64_t(1) << current_->index % 64;
}

void Machine::finish_first(Thread& thread) {
  const Pending one = thread.pending.front();
  thread.pending.pop_front();
  if (thread.pending.empty()) asking_[thread.index / 64] &= ~(uint64_t(1) << thread.index % 64);
  finish(one);
}

bool Machine::advance() {
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

bool Machine::next_is_lazy() {
  const size_t eager = ready_[0].size(), lazy = ready_[1].size();
  if (eager == 0 || lazy == 0) return eager == 0;
  // std::pow took a tenth of all that the emulator does.
  const float share = float(lazy) / float(eager + lazy);
  float all = share;
  for (int tries = 1; tries < kTries; tries = 2 * tries + 1) all *= all * share;
  constexpr int kSteps = 1 << 24;
  return float(random_.below(kSteps)) < kSteps * all;
}

std::string Machine::whereabouts() const {
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

void Machine::begin(unsigned high, unsigned low) {
  Machine& machine = *reinterpret_cast<Machine*>(uintptr_t(high) << 32 | low);
  (*machine.kernel_)();
  machine.end();
}

void Machine::end() {
  while (!current_->pending.empty()) finish_first(*current_);
  --alive_;
  _longjmp(scheduler_, 1);
}

std::string launch(const std::function<void()>& kernel, unsigned grid, unsigned threads, uint64_t seed,
                   uint8_t* (*shared)()) {
  std::vector<unsigned> order(grid);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  std::atomic<unsigned> next{0};
  std::mutex mutex;
  std::string error;
  const auto work = [&] {
    auto own = machines.take();
    machine = own.get();
    for (unsigned at; (at = next++) < grid;) {
      const unsigned block = order[at];
      try {
        own->run(kernel, block, grid, threads, shared(), seed << 32 | block);
      } catch (const std::runtime_error& failed) {
        const std::lock_guard<std::mutex> guard(mutex);
        error = failed.what();
        next = grid;
      }
    }
    machines.give_back(std::move(own));
  };
  std::vector<std::thread> workers;
  for (unsigned i = 0; i < std::min(grid, std::thread::hardware_concurrency()); ++i) workers.emplace_back(work);
  for (std::thread& worker : workers) worker.join();
  return error;
}

}  // namespace emulator
