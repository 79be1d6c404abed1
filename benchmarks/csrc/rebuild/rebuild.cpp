// What the native scheduler is compared with: a tree rebuilt from block tables for every plan, as the original PAT does.
// Rows are grouped by hashing block after block; the packing that follows is the native scheduler's own.

#include <numeric>
#include <unordered_map>

#include "../../../sglang_pat/csrc/packing/module.cpp"

namespace {

// `rows` [batch, blocks] names each request's blocks of `page` tokens.
int64_t rebuild(int64_t handle, TensorView rows, int64_t page, TensorView seq_lens) {
  Scheduler& scheduler = at(handle);
  const int32_t* blocks = static_cast<const int32_t*>(rows.data_ptr());
  const int64_t batch = rows.size(0), width = rows.size(1);
  scheduler.reset();
  struct Group {
    std::vector<int32_t> queries;
    int64_t node, block;
  };
  std::vector<int64_t> last(batch, pat::kRootId);
  std::vector<Group> stack(1);
  stack[0].node = pat::kRootId;
  stack[0].block = 0;
  for (int32_t query = 0; query < batch; ++query) stack[0].queries.push_back(query);
  int64_t nodes = 0;
  std::unordered_map<int32_t, std::vector<int32_t>> by_block;
  while (!stack.empty()) {
    const Group group = std::move(stack.back());
    stack.pop_back();
    by_block.clear();
    if (group.block < width)
      for (const int32_t query : group.queries) by_block[blocks[query * width + group.block]].push_back(query);
    for (auto& [block, queries] : by_block) {
      if (queries.size() < 2) continue;
      int64_t end = group.block + 1;
      const int32_t* first = blocks + queries[0] * width;
      const auto all_have = [&](int64_t at) {
        for (const int32_t query : queries)
          if (blocks[query * width + at] != first[at]) return false;
        return true;
      };
      while (end < width && all_have(end)) ++end;
      const int64_t node = ++nodes;
      scheduler.insert(node, group.node, (end - group.block) * page, block, 0);
      for (const int32_t query : queries) last[query] = node;
      stack.push_back(Group{std::move(queries), node, end});
    }
  }
  std::vector<int64_t> requests(batch);
  std::iota(requests.begin(), requests.end(), 0);
  for (const int64_t request : requests) scheduler.bind(request, last[request]);
  return scheduler.take(requests.data(), static_cast<const int64_t*>(seq_lens.data_ptr()), batch, 0, false).buffer;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rebuild, rebuild);
