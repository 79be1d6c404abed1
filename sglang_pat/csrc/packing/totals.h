// Counts over all steps that were run.
#pragma once

#include <cstdint>
#include <cstddef>

#include "balance.h"

namespace pat {

struct Totals {
  Statistics statistics;  // summed over steps
  int64_t steps = 0, requests = 0;

  // `steps` steps of a plan.
  void add(const Statistics& plan, int64_t steps) {
    // Every step each request, and with it every tail that grows, has one token more.
    const int64_t grown = steps * (steps - 1) / 2;
    this->steps += steps;
    add_up(statistics.items, steps, plan.items);
    add_up(statistics.parts, steps, plan.parts);
    add_up(statistics.kv_tokens, steps, plan.kv_tokens);
    add_up(statistics.kv_tokens, grown, plan.growing_tails);
    add_up(statistics.seq_tokens, steps, plan.seq_tokens);
    add_up(statistics.seq_tokens, grown, plan.growing_tails);
    for (size_t i = 0; i < plan.query_sizes.size(); ++i) {
      add_up(statistics.query_sizes[i], steps, plan.query_sizes[i]);
      add_up(statistics.kv_by_queries[i], steps, plan.kv_by_queries[i]);
    }
    add_up(statistics.kv_by_queries[1], grown, plan.growing_tails);
  }

 private:
  // Counts wrap around, as no server lives so long; a trace may say that one did.
  static void add_up(int64_t& sum, int64_t times, int64_t count) {
    sum = int64_t(uint64_t(sum) + uint64_t(times) * uint64_t(count));
  }
};

}  // namespace pat
