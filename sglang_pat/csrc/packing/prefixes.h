// The compact prefix tree of a batch (sglang_pat/packing/tree.py, `compact`), taken out of the mirror.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "mirror.h"

namespace pat {

// At least two queries share [start, end). Prefixes stand in preorder, so that a subtree is a range of them.
struct Prefix {
  int32_t start, end;
  int32_t parent, depth;                   // depth of the first level is 0, of the empty root -1
  int32_t last;                            // one past the last prefix of the subtree
  int32_t first, leaves_end, queries_end;  // in `order`: the leaves, then the queries of the children

  int32_t leaves() const { return leaves_end - first; }
  int32_t queries() const { return queries_end - first; }
};

struct Prefixes {
  std::vector<Prefix> nodes;   // [0] is the root
  std::vector<int32_t> order;  // batch positions, those of a prefix side by side
  int64_t kv_minimum = 0;      // KV tokens when each is read once
  int32_t max_depth = -1;

  // Tokens of a prefix's tails, of which it has some, on average.
  int64_t mean_tail(const Prefix& prefix, const int32_t* seq_lens) const {
    int64_t tokens = 0;
    for (int32_t i = prefix.first; i < prefix.leaves_end; ++i) tokens += seq_lens[order[i]] - prefix.end;
    return tokens / prefix.leaves();
  }

  void reserve(size_t batch) {
    order.reserve(batch);
    next_leaf_.reserve(batch);
  }

  // `requests[i]` is the request at batch position i, kNone for one that the mirror does not know. Bounds are rounded down to multiples of
  // `piece`, so a prefix may be empty.
  void take(Mirror& mirror, const std::vector<int32_t>& requests, const std::vector<int32_t>& seq_lens, int32_t piece) {
    piece_ = piece;
    mark(mirror, requests, seq_lens);
    hang_leaves(mirror, requests, seq_lens);
    nodes.clear();
    order.clear();
    kv_minimum = 0;
    max_depth = -1;
    stack_.assign(1, Visit{kRoot, kNone});
    while (!stack_.empty()) {
      const Visit visit = stack_.back();
      stack_.pop_back();
      visit_node(mirror, visit, seq_lens);
    }
    close();
  }

  // Keeps the first `levels` levels. Who shares more has a tail from there.
  void keep_levels(int32_t levels, const std::vector<int32_t>& seq_lens) {
    if (max_depth < levels) return;
    above_.assign(1, kNone);  // the last prefix of each level, below nothing
    size_t kept = 0;
    for (Prefix prefix : nodes) {
      if (prefix.depth >= levels) continue;
      if (prefix.depth == levels - 1) {
        prefix.leaves_end = prefix.queries_end;
        std::sort(order.begin() + prefix.first, order.begin() + prefix.leaves_end);
      }
      above_.resize(prefix.depth + 2);
      prefix.parent = above_.back();
      above_.push_back(int32_t(kept));
      prefix.last = int32_t(kept) + 1;
      nodes[kept++] = prefix;
    }
    nodes.resize(kept);
    max_depth = levels - 1;
    close();
    kv_minimum = 0;
    for (const Prefix& prefix : nodes) {
      kv_minimum += prefix.end - prefix.start;
      for (int32_t i = prefix.first; i < prefix.leaves_end; ++i) kv_minimum += seq_lens[order[i]] - prefix.end;
    }
  }

 private:
  struct Visit {
    int32_t node, parent;
  };

  // Where subtrees end, from where each prefix itself does.
  void close() {
    for (size_t i = nodes.size(); i-- > 1;) {
      Prefix& parent = nodes[nodes[i].parent];
      parent.last = std::max(parent.last, nodes[i].last);
      parent.queries_end = std::max(parent.queries_end, nodes[i].queries_end);
    }
  }

  // The first query that passes a node visits it, the second one makes it shared: an even stamp, then an odd one.
  void mark(Mirror& mirror, const std::vector<int32_t>& requests, const std::vector<int32_t>& seq_lens) {
    stamp_ = mirror.next_stamp();
    reset(mirror.node(kRoot));
    for (size_t query = 0; query < requests.size(); ++query) {
      int32_t index = node_of(mirror, requests[query], seq_lens[query]);
      while (index != kRoot) {
        Node& node = mirror.node(index);
        if (node.stamp < stamp_) {
          reset(node);
        } else if (node.stamp == stamp_) {
          node.stamp = stamp_ + 1;
          Node& parent = mirror.node(node.parent);
          append(parent.shared_child, parent.last_shared_child, index,
                 [&](int32_t last) -> int32_t& { return mirror.node(last).next_shared; });
        } else {
          break;
        }
        index = node.parent;
      }
    }
  }

  void hang_leaves(Mirror& mirror, const std::vector<int32_t>& requests, const std::vector<int32_t>& seq_lens) {
    next_leaf_.resize(requests.size());
    for (size_t query = 0; query < requests.size(); ++query) {
      int32_t index = node_of(mirror, requests[query], seq_lens[query]);
      while (index != kRoot && mirror.node(index).stamp == stamp_) index = mirror.node(index).parent;
      Node& node = mirror.node(index);
      next_leaf_[query] = kNone;
      append(node.first_leaf, node.last_leaf, int32_t(query), [&](int32_t last) -> int32_t& { return next_leaf_[last]; });
    }
  }

  void visit_node(Mirror& mirror, Visit visit, const std::vector<int32_t>& seq_lens) {
    const Node* node = &mirror.node(visit.node);
    const int32_t start = rounded(node->start);
    // Without leaves, an only shared child has all of the node's queries.
    while (visit.parent != kNone && node->first_leaf == kNone && node->shared_child == node->last_shared_child)
      node = &mirror.node(node->shared_child);
    const int32_t end = rounded(node->end());
    const int32_t index = int32_t(nodes.size()), first = int32_t(order.size());
    for (int32_t query = node->first_leaf; query != kNone; query = next_leaf_[query]) {
      order.push_back(query);
      kv_minimum += seq_lens[query] - end;
    }
    const int32_t leaves_end = int32_t(order.size());
    const int32_t depth = visit.parent == kNone ? -1 : nodes[visit.parent].depth + 1;
    nodes.push_back(Prefix{start, end, visit.parent, depth, index + 1, first, leaves_end, leaves_end});
    kv_minimum += end - start;
    max_depth = std::max(max_depth, depth);
    const size_t children = stack_.size();
    for (int32_t child = node->shared_child; child != kNone; child = mirror.node(child).next_shared)
      stack_.push_back(Visit{child, index});
    std::reverse(stack_.begin() + children, stack_.end());
  }

  void reset(Node& node) {
    node.stamp = stamp_;
    node.shared_child = node.last_shared_child = node.next_shared = kNone;
    node.first_leaf = node.last_leaf = kNone;
  }

  template <typename Next>
  static void append(int32_t& first, int32_t& last, int32_t element, Next next) {
    (last == kNone ? first : next(last)) = element;
    last = element;
  }

  // Where the request's path ends. One that is longer than the request cannot be right, so that it shares nothing.
  static int32_t node_of(Mirror& mirror, int32_t request, int32_t tokens) {
    if (request == kNone) return kRoot;
    const int32_t node = mirror.request(request).node;
    return mirror.node(node).end() <= tokens ? node : kRoot;
  }

  int32_t rounded(int32_t position) const { return piece_ > 0 ? position - position % piece_ : position; }

  int32_t piece_ = 0;
  uint64_t stamp_ = 0;
  std::vector<int32_t> next_leaf_, above_;
  std::vector<Visit> stack_;
};

}  // namespace pat
