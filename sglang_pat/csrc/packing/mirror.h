// The paths of the running requests, rebuilt from radix-tree events. tests/oracle/mirror.py is its oracle.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "index.h"

namespace pat {

constexpr int32_t kNone = -1, kRoot = 0;
constexpr int64_t kRootId = -1;
constexpr int64_t kMaxPosition = INT32_MAX;  // of a token in its request

// A request is a row of req_to_token, and which of its owners: the row in the lower 32 bits, above them how often it was handed out.
constexpr int64_t kNoRequest = -1;
inline int64_t row_of(int64_t key) { return key & 0xffffffff; }

// What tells siblings apart: a digest of namespace and first page.
struct Head {
  int64_t high, low;
  bool operator==(const Head& other) const { return high == other.high && low == other.low; }
};

struct Node {
  int32_t parent, start, length;
  // Of the batch being planned; prefixes.h.
  uint64_t stamp = 0;
  int32_t shared_child = kNone, last_shared_child = kNone, next_shared = kNone;
  int32_t first_leaf = kNone, last_leaf = kNone;
  int32_t first_child = kNone, next_sibling = kNone, previous_sibling = kNone;
  int32_t first_request = kNone;
  int64_t id;
  Head head;

  int32_t end() const { return start + length; }
};

struct Request {
  int32_t node = kNone;  // where its path ends; the root, if it is known to share nothing, or nothing is known
  int64_t key = kNoRequest;
  int32_t next = kNone, previous = kNone;
  int32_t position = kNone;  // in the batch expected next
  bool counted = false;      // among the requests decoded
};

// Room for one element more, and more than that, as `push_back` grows. If memory runs out, nothing has changed.
template <typename Element>
void make_room(std::vector<Element>& elements) {
  if (elements.size() == elements.capacity()) elements.reserve(2 * elements.size() + 1);
}

// An event does not fit what the mirror knows.
struct Inconsistent : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Every event allocates before it changes anything: if memory runs out, all is as it was.
class Mirror {
 public:
  Mirror() : by_id_(HashOfId{this}), by_head_(HashOfHead{this}), by_row_(HashOfRow{this}) { clear(); }
  Mirror(const Mirror&) = delete;

  // Room for requests and the nodes at their ends; what is above these grows once.
  void reserve(size_t count) {
    nodes_.reserve(count);
    requests_.reserve(count);
  }

  void insert(int64_t id, int64_t parent_id, int64_t length, Head head) {
    const int32_t parent = known(parent_id);
    if (find(id) != kNone || child(parent, head) != kNone || length <= 0 || length > kMaxPosition - nodes_[parent].end())
      throw Inconsistent("node " + std::to_string(id) + " inserted below " + std::to_string(parent_id) +
                         " twice, or empty or too long");
    make_room_for_node();
    link(add_node(id, head, nodes_[parent].end(), int32_t(length)), parent);
  }

  void split(int64_t id, int64_t upper_id, int64_t length, Head head) {
    const int32_t node = known(id);
    if (find(upper_id) != kNone || length <= 0 || length >= nodes_[node].length || node == kRoot)
      throw Inconsistent("node " + std::to_string(id) + " split at " + std::to_string(length));
    const int32_t parent = nodes_[node].parent;
    const Head old_head = nodes_[node].head;
    const int32_t start = nodes_[node].start;
    make_room_for_node();
    unlink(node);
    const int32_t upper = add_node(upper_id, old_head, start, int32_t(length));
    link(upper, parent);
    Node& lower = nodes_[node];
    lower.head = head;
    lower.start = start + int32_t(length);
    lower.length -= int32_t(length);
    link(node, upper);
  }

  // Calls lost(request) for every request below a node that the cache dropped, which it never should; these share nothing
  // from then on.
  template <typename Lost>
  void evict(int64_t id, Lost lost) {
    const int32_t node = find(id);
    if (node == kNone || node == kRoot) return;
    const Inconsistent error("node " + std::to_string(id) + " was evicted while requests were running on it");
    std::vector<int32_t> below{node}, requests;
    while (!below.empty()) {
      const Node& n = nodes_[below.back()];
      below.pop_back();
      for (int32_t c = n.first_child; c != kNone; c = nodes_[c].next_sibling) below.push_back(c);
      for (int32_t r = n.first_request; r != kNone; r = requests_[r].next) requests.push_back(r);
    }
    for (const int32_t request : requests) {
      lost(request);
      move(request, kRootId);
    }
    throw error;
  }

  // Forgets every node; requests share nothing from then on.
  void clear() {
    nodes_.assign(1, make_node(kRootId, Head{0, 0}, 0, 0));
    free_nodes_.clear();
    by_id_.clear();
    by_head_.clear();
    by_id_.insert(kRoot);
    for (int32_t i = 0; i < int32_t(requests_.size()); ++i)
      if (requests_[i].node != kNone) hang(i, kRoot);
  }

  // A request that hangs at the root, in a row that nobody has.
  int32_t enter(int64_t key) {
    make_room_for(requests_, free_requests_);
    by_row_.make_room();
    const int32_t request = place(requests_, free_requests_);
    requests_[request] = Request{};
    requests_[request].key = key;
    by_row_.insert(request);
    hang(request, kRoot);
    return request;
  }

  // It shares what is above the node `id`.
  void move(int32_t request, int64_t id) {
    const int32_t node = known(id), previous = requests_[request].node;
    if (node == previous) return;
    unhang(request);
    hang(request, node);
    prune(previous);
  }

  void release(int32_t request) { prune(remove(request)); }

  // The same, but the nodes above stay: returns where it hung.
  int32_t remove(int32_t request) {
    const int32_t node = requests_[request].node;
    by_row_.erase(request);
    unhang(request);
    requests_[request] = Request{};
    free_requests_.push_back(request);
    return node;
  }

  // Forget `node` and its ancestors as far as no request uses them.
  void prune(int32_t node) {
    while (node > kRoot && nodes_[node].first_request == kNone && nodes_[node].first_child == kNone) {
      const int32_t parent = nodes_[node].parent;
      unlink(node);
      by_id_.erase(node);
      nodes_[node].id = kRootId;
      free_nodes_.push_back(node);
      node = parent;
    }
  }

  int32_t find(int64_t id) const {
    return by_id_.find(mix(uint64_t(id)), [&](int32_t node) { return nodes_[node].id == id; });
  }

  int32_t child(int32_t parent, Head head) const {
    return by_head_.find(hash(parent, head),
                         [&](int32_t node) { return nodes_[node].parent == parent && nodes_[node].head == head; });
  }

  // A request whose path leads through `node`, kNone if there is none yet.
  int32_t any_request(int32_t node) const {
    while (nodes_[node].first_request == kNone && nodes_[node].first_child != kNone) node = nodes_[node].first_child;
    return nodes_[node].first_request;
  }

  // Who has the row of `key`, kNone if nobody has it.
  int32_t at_row(int64_t key) const {
    return by_row_.find(mix(uint64_t(row_of(key))),
                        [&](int32_t request) { return row_of(requests_[request].key) == row_of(key); });
  }

  // The request `key`, kNone if it is not known.
  int32_t find_request(int64_t key) const {
    const int32_t request = at_row(key);
    return request != kNone && requests_[request].key == key ? request : kNone;
  }

  int32_t known(int64_t id) const {
    const int32_t node = find(id);
    if (node == kNone) throw Inconsistent("node " + std::to_string(id) + " is not known");
    return node;
  }

  Node& node(int32_t index) { return nodes_[index]; }
  Request& request(int32_t index) { return requests_[index]; }
  // Marks of nodes: whoever marks some gets an even number that nobody had before, and the odd one behind it.
  uint64_t next_stamp() { return stamp_ += 2; }

  size_t active_nodes() const { return nodes_.size() - free_nodes_.size() - 1; }
  size_t active_requests() const { return requests_.size() - free_requests_.size(); }
  size_t bytes() const {
    return nodes_.size() * sizeof(Node) + free_nodes_.capacity() * sizeof(int32_t) + by_id_.bytes() + by_head_.bytes() +
           by_row_.bytes();
  }

 private:
  struct HashOfId {
    const Mirror* mirror;
    uint64_t operator()(int32_t node) const { return mix(uint64_t(mirror->nodes_[node].id)); }
  };
  struct HashOfHead {
    const Mirror* mirror;
    uint64_t operator()(int32_t node) const { return hash(mirror->nodes_[node].parent, mirror->nodes_[node].head); }
  };

  struct HashOfRow {
    const Mirror* mirror;
    uint64_t operator()(int32_t request) const { return mix(uint64_t(row_of(mirror->requests_[request].key))); }
  };

  static uint64_t hash(int32_t parent, Head head) {
    return mix(uint64_t(head.high) ^ mix(uint64_t(head.low) + uint64_t(parent)));
  }

  // One that is free counts, and whatever there is may become free.
  template <typename Element>
  static void make_room_for(std::vector<Element>& elements, std::vector<int32_t>& free) {
    if (free.empty()) make_room(elements);
    free.reserve(elements.capacity());
  }

  void make_room_for_node() {
    make_room_for(nodes_, free_nodes_);
    by_id_.make_room();
    by_head_.make_room();
  }

  // Index of an element that is free, or new.
  template <typename Element>
  static int32_t place(std::vector<Element>& elements, std::vector<int32_t>& free) {
    if (free.empty()) {
      elements.emplace_back();
      return int32_t(elements.size()) - 1;
    }
    const int32_t index = free.back();
    free.pop_back();
    return index;
  }

  static Node make_node(int64_t id, Head head, int32_t start, int32_t length) {
    Node node{kNone, start, length};
    node.id = id;
    node.head = head;
    return node;
  }

  int32_t add_node(int64_t id, Head head, int32_t start, int32_t length) {
    const int32_t node = place(nodes_, free_nodes_);
    nodes_[node] = make_node(id, head, start, length);
    by_id_.insert(node);
    return node;
  }

  void link(int32_t node, int32_t parent) {
    Node& n = nodes_[node];
    n.parent = parent;
    n.previous_sibling = kNone;
    n.next_sibling = nodes_[parent].first_child;
    if (n.next_sibling != kNone) nodes_[n.next_sibling].previous_sibling = node;
    nodes_[parent].first_child = node;
    by_head_.insert(node);
  }

  void unlink(int32_t node) {
    by_head_.erase(node);
    const Node& n = nodes_[node];
    if (n.next_sibling != kNone) nodes_[n.next_sibling].previous_sibling = n.previous_sibling;
    (n.previous_sibling == kNone ? nodes_[n.parent].first_child : nodes_[n.previous_sibling].next_sibling) = n.next_sibling;
  }

  void hang(int32_t request, int32_t node) {
    Request& r = requests_[request];
    r.node = node;
    r.previous = kNone;
    r.next = nodes_[node].first_request;
    if (r.next != kNone) requests_[r.next].previous = request;
    nodes_[node].first_request = request;
  }

  void unhang(int32_t request) {
    const Request& r = requests_[request];
    if (r.next != kNone) requests_[r.next].previous = r.previous;
    (r.previous == kNone ? nodes_[r.node].first_request : requests_[r.previous].next) = r.next;
  }

  std::vector<Node> nodes_;
  std::vector<Request> requests_;
  std::vector<int32_t> free_nodes_, free_requests_;
  Index<HashOfId> by_id_;
  Index<HashOfHead> by_head_;
  Index<HashOfRow> by_row_;
  uint64_t stamp_ = 0;
};

}  // namespace pat
