// Lets every allocation of every event fail, the first, the second ... until the event succeeds, and compares the scheduler
// with one that has memory: after a failure it knows what it knew before, or what it is to know afterwards. Prints how many
// failures there were, and what is left when all requests are released.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <vector>

#include "../../sglang_pat/csrc/packing/scheduler.h"

namespace {
int64_t allowed = -1;  // allocations before one fails; negative: all succeed

bool fails() { return allowed >= 0 && allowed-- == 0; }
}  // namespace

void* operator new(size_t size) {
  if (void* memory = fails() ? nullptr : std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t size, std::align_val_t alignment) {
  const size_t unit = size_t(alignment);
  if (void* memory = fails() ? nullptr : std::aligned_alloc(unit, (size + unit - 1) / unit * unit)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace {
constexpr int kInts = 1 << 16;
constexpr int64_t kSeqLen = 1 << 20, kHeads = 12;

struct Server {
  std::vector<int32_t> buffers[2] = {std::vector<int32_t>(kInts), std::vector<int32_t>(kInts)};
  pat::Scheduler scheduler;

  Server(const pat::Config& config, int64_t slots)
      : scheduler(config, {{buffers[0].data(), kInts}, {buffers[1].data(), kInts}}, 1, slots) {}
};

std::vector<int64_t> state(Server& server, int64_t nodes, const std::vector<int64_t>& keys) {
  pat::Scheduler& scheduler = server.scheduler;
  std::vector<int64_t> found = {int64_t(scheduler.active_nodes()), int64_t(scheduler.active_requests())};
  for (int64_t id = 1; id <= nodes; ++id) {
    int64_t parent = 0, length = 0;
    const bool known = scheduler.find(id, parent, length) != pat::kNone;
    found.insert(found.end(), {known, parent, length});
    for (int64_t head = 0; known && head < kHeads; ++head) found.push_back(scheduler.child(id, head, 0));
  }
  for (const int64_t key : keys) {
    int64_t node = 0, end = 0;
    found.insert(found.end(), {scheduler.binding(key, node, end), node, end});
  }
  found.insert(found.end(), scheduler.batch().begin(), scheduler.batch().end());
  return found;
}

[[noreturn]] void fail(const char* what, const char* event, unsigned seed) {
  std::printf("seed %u, %s: %s\n", seed, event, what);
  std::exit(1);
}
}  // namespace

int main() {
  int64_t failures = 0, left = 0;
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    pat::Config config;
    config.token_bytes = 4096, config.part_bytes = 33024, config.turn_price = 0, config.warp_queries = 0;
    config.few_queries = 32, config.group = 4, config.runs = 8, config.workers = 16, config.max_queries = 32;
    config.policy = pat::Policy::kOptimal;
    config.pack_prices.tokens.assign(33, 4096), config.pack_prices.starts.assign(33, 80000);
    config.short_tokens.assign(33, 0), config.bin_prices = config.pack_prices;
    config.query_tiles = {16, 128}, config.kv_tile = 64, config.flat = true;
    // Some plans do not fit.
    const int64_t slots = seed % 2 ? 100 : 1 << 20;
    Server tried(config, slots), twin(config, slots);
    int64_t nodes = 0, rows = 0;
    std::vector<int64_t> keys, seq_lens(300, kSeqLen);
    // `event` on both; on one of them it fails until it has all the memory that it wants.
    const auto both = [&](const char* name, const auto& event) {
      const auto apply = [&](Server& server) {
        try {
          event(server.scheduler);
        } catch (const pat::Inconsistent&) {
        } catch (const pat::TooLarge&) {
        }
      };
      const std::vector<int64_t> before = state(twin, nodes, keys);
      apply(twin);
      const std::vector<int64_t> after = state(twin, nodes, keys);
      for (int64_t count = 0;; ++count) {
        allowed = count;
        bool failed = false;
        try {
          apply(tried);
        } catch (const std::bad_alloc&) {
          failed = true;
        }
        allowed = -1;
        const std::vector<int64_t> found = state(tried, nodes, keys);
        if (!failed) {
          if (found != after) fail("the events led elsewhere", name, seed);
          return;
        }
        ++failures;
        if (found != before && found != after) fail("half of the event was done", name, seed);
      }
    };
    const auto any_node = [&] { return nodes == 0 || random() % 5 == 0 ? pat::kRootId : int64_t(1 + random() % nodes); };
    const auto any_key = [&] {
      // A new row, a request, or somebody else in its row.
      if (keys.empty() || random() % 3 > 0)
        keys.push_back(rows++);
      else if (random() % 3 == 0)
        keys.push_back(keys[random() % keys.size()] + (int64_t(1) << 32));
      else
        return keys[random() % keys.size()];
      return keys.back();
    };
    for (int step = 0; step < 400; ++step) {
      const unsigned kind = random() % 100;
      const int64_t head = random() % kHeads;
      if (kind < 35) {
        const int64_t id = ++nodes, parent = any_node(), length = 1 + random() % 200;
        both("insert", [=](pat::Scheduler& s) { s.insert(id, parent, length, head, 0); });
      } else if (kind < 50) {
        const int64_t id = any_node(), upper = ++nodes, length = 1 + random() % 100;
        both("split", [=](pat::Scheduler& s) { s.split(id, upper, length, head, 0); });
      } else if (kind < 75) {
        const int64_t key = any_key(), node = any_node();
        both("bind", [=](pat::Scheduler& s) { s.bind(key, node); });
      } else if (kind < 86) {
        const int64_t key = any_key();
        both("expect", [=](pat::Scheduler& s) { s.expect(key, kSeqLen); });
      } else if (kind < 91 && !keys.empty()) {
        const int64_t key = keys[random() % keys.size()];
        both("release", [=](pat::Scheduler& s) { s.release(key); });
      } else if (kind < 93) {
        const int64_t key = any_key();
        both("withdraw", [=](pat::Scheduler& s) { s.withdraw(key); });
      } else if (kind < 94) {
        const int64_t id = any_node();
        both("evict", [=](pat::Scheduler& s) { s.evict(id); });
      } else if (kind < 95 && random() % 4 == 0) {
        both("reset", [](pat::Scheduler& s) { s.reset(); });
      } else {
        const bool aside = random() % 3 == 0;
        std::vector<int64_t> batch = twin.scheduler.batch();
        if (random() % 2) batch = keys;
        std::sort(batch.begin(), batch.end());
        batch.erase(std::unique(batch.begin(), batch.end()), batch.end());
        if (batch.size() > seq_lens.size()) batch.resize(seq_lens.size());
        if (random() % 2) std::shuffle(batch.begin(), batch.end(), random);
        const int64_t size = int64_t(batch.size());
        int buffers[2] = {0, 0};  // of the twin, and of the one that is tried
        both("take", [&](pat::Scheduler& s) {
          buffers[&s == &tried.scheduler] = s.take(batch.data(), seq_lens.data(), size, 0, aside).buffer;
        });
        const std::vector<int32_t>&plan = tried.buffers[buffers[1]], &right = twin.buffers[buffers[0]];
        if (!std::equal(plan.begin(), plan.begin() + right[pat::kSize], right.begin())) fail("another plan", "take", seed);
        const std::vector<int64_t> added(batch.size(), 2);
        both("extend", [&](pat::Scheduler& s) { s.extend(batch.data(), seq_lens.data(), added.data(), size); });
        if (tried.scheduler.extended().data() != twin.scheduler.extended().data()) fail("another plan", "extend", seed);
      }
    }
    for (const int64_t key : keys) both("release", [=](pat::Scheduler& s) { s.release(key); });
    tried.scheduler.reset(), twin.scheduler.reset();
    left += tried.scheduler.active_nodes() + tried.scheduler.active_requests();
  }
  std::printf("%ld %ld\n", long(failures), long(left));
  return 0;
}
