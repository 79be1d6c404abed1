// Producer of wide items for pages of 4 or 2 bits: copies records to shared memory and writes them as 16-bit K and V, [64
// tokens, dim] each, into the ring's stages (ring.cuh). The tokens behind a request's last full page, in 16 bits already,
// fill a stage pair of their own. Consumers see the same ring as with 16-bit KV. page.cuh runs it.
#pragma once

#include "../ring.cuh"
#include "page_record.cuh"

namespace pat {

// Shared memory of wide items: the ring, Q, and `kAhead` records that wait for conversion.
template <typename Kv, int kDim, int kStages, int kAhead>
struct WidePageMemory {
  static constexpr int kBuffers = query_buffers(true);
  alignas(kPanelAlign) uint8_t ring[kStages * kStageBytes<kDim>];
  WideQueries<kDim> queries[kBuffers];
  alignas(kCopyBytes) uint8_t records[kAhead][Record<Kv::kBits, kDim>::kBytes];
};

// Writes a record as swizzled panels, by the four producer warps: 16 tokens each. Values are those of `RecordReader`,
// rounded once; scale, code and zero are __half.
template <int kBits, int kDim>
class RecordPanels {
  using R = Record<kBits, kDim>;
  static constexpr uint32_t kMost = 0x7bff7bff;  // largest __half, twice: an infinity would spoil all sums

 public:
  // A thread has 32 channels of two tokens eight apart. Eight neighbouring channels are in the words of four lanes, two
  // each.
  static __device__ __forceinline__ void keys(const uint8_t* record, uint8_t* stage) {
    const int token = lane_id() % 8, quarter = lane_id() / 8;
    if (quarter >= kDim / 32) return;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int step = 2 * quarter + j;
      uint32_t numbers[2][2][4];  // of each token, eight channels twice
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * R::key_parameter(16 * step + 2 * i) / 2;
        const uint2 scale = two_words(record + at), zero = two_words(record + R::kKeyZeros + at);
        const uint32_t codes = word(record + R::kKeyCodes, step, R::lane_of(token, i));
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
          const int field = R::field_of(j, eight);
#pragma unroll
          for (int upper = 0; upper < 2; ++upper) {
            const uint32_t code = R::in_field(upper ? codes >> 8 : codes, field);
            numbers[upper][eight][i] =
                number(multiply_add_pair(code, kOne, kMinusCodeBase), eight ? scale.y : scale.x, eight ? zero.y : zero.x);
          }
        }
      }
#pragma unroll
      for (int upper = 0; upper < 2; ++upper)
#pragma unroll
        for (int eight = 0; eight < 2; ++eight)
          write(stage, 16 * chunk() + token + 8 * upper, 2 * step + eight, numbers[upper][eight]);
    }
  }

  // A thread has 16 channels of four tokens. Neighbouring channels are in the words of different lanes.
  static __device__ __forceinline__ void values(const uint8_t* record, uint8_t* stage) {
    const int pair = lane_id() % 4, step = lane_id() / 4;
    if (step >= kDim / 16) return;
    uint32_t tokens[2][4];  // pairs of channels, of a token and the next one
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t first = word(record + R::kValueCodes, step, R::lane_of(2 * i, pair));
      const uint32_t second = word(record + R::kValueCodes, step, R::lane_of(2 * i + 1, pair));
      tokens[0][i] = __byte_perm(first, second, 0x5410), tokens[1][i] = __byte_perm(first, second, 0x7632);
    }
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const uint2 own = two_words(record + R::kValueParameters + 2 * R::value_parameter(16 * chunk() + 2 * pair + odd));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Threads of neighbouring steps begin with different halves, so that together they use all banks.
        const int eight = (i + step) % 2, field = R::field_of(step, eight), bits = kBits * field;
        const uint32_t factor = kOne - bits * kBit, minus = kMinusCodeBase - bits * kBit;
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          const uint32_t scale = __byte_perm(upper ? own.y : own.x, 0, 0x1010);
          const uint32_t zero = __byte_perm(upper ? own.y : own.x, 0, 0x3232);
          uint32_t numbers[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const uint32_t code = R::in_field(upper ? tokens[odd][j] >> 8 : tokens[odd][j], field);
            numbers[j] = number(multiply_add_pair(code, factor, minus), scale, zero);
          }
          write(stage, 16 * chunk() + 2 * pair + odd + 8 * upper, 2 * step + eight, numbers);
        }
      }
    }
  }

 private:
  static constexpr uint32_t kOne = 0x3c003c00, kBit = 0x04000400;  // 1, twice; and the step of the exponent, from 1 to 2

  static __device__ int chunk() { return thread_of<kWarpgroupThreads>() / kWarpSize; }

  static __device__ __forceinline__ uint32_t word(const uint8_t* codes, int step, int lane) {
    return reinterpret_cast<const uint32_t*>(codes)[R::word_of(chunk(), step, lane)];
  }
  static __device__ __forceinline__ uint2 two_words(const uint8_t* from) { return *reinterpret_cast<const uint2*>(from); }

  static __device__ __forceinline__ uint32_t number(uint32_t code, uint32_t scale, uint32_t zero) {
    return least_pair(multiply_add_pair(code, scale, zero), kMost);
  }

  static __device__ __forceinline__ void write(uint8_t* stage, int token, int column, const uint32_t (&numbers)[4]) {
    *reinterpret_cast<uint4*>(stage + panel_offset(token, column, kPanelBytes)) =
        make_uint4(numbers[0], numbers[1], numbers[2], numbers[3]);
  }
};

// All producer threads copy each record together: a barrier tells that it has landed, and that the one before was read.
template <typename T, typename Kv, int kDim, int kStages, int kAhead, typename WorkItems>
class PageProducer : TileRows<kDim, kDim* int(sizeof(T))> {
  using Rows = TileRows<kDim, kDim* int(sizeof(T))>;
  using Rows::kRowThreads, Rows::kRows, Rows::kStride, Rows::thread;
  using Memory = WidePageMemory<Kv, kDim, kStages, kAhead>;
  using Product = typename Kv::Product;
  using Panels = RecordPanels<Kv::kBits, kDim>;
  static constexpr int kRecord = Record<Kv::kBits, kDim>::kBytes, kThreads = producer_threads(kDim);
  static_assert(kThreads == kWarpgroupThreads && kAhead >= 2);

  // A KV tile of an item. `from` is a slot of its page as loaded (see `Chunk` in page_load.cuh).
  struct Cursor {
    int item = -1, begin = 0, tokens = 0, from = 0, head = 0;

    __device__ bool at_page() const { return tokens - begin >= kTokens; }
  };

 public:
  template <typename CtaMemory>
  __device__ PageProducer(const Params& p, const WorkItems& items, CtaMemory& memory)
      : p_(p),
        items_(items),
        memory_(memory.wide),
        cursor_(memory.barriers.ring),
        queries_(p, items, memory.wide.queries, memory.barriers.queries) {}

  // All items of one look-up.
  __device__ void run() {
    if (items_.count(kWide) == 0) return;
    queries_.read(0);
    issue_more_ = advance();
#pragma unroll 1
    for (int i = 0; i < kAhead - 1; ++i) issue();
#pragma unroll 1
    for (int i = 0; i < items_.count(kWide); ++i) {
      const Item& item = items_.get(kWide, i);
      queries_.copy();
      queries_.read(i + 1);
#pragma unroll 1
      for (int left = item.tokens; left > 0; left -= kTokens) {
        wait_copies<kAhead - 2>();
        sync_threads(kProducerBarrier, kThreads);
        issue();
        if (left >= kTokens)
          convert_page(memory_.records[at_]);
        else
          convert_tail(item, left);
        at_ = next(at_);
      }
    }
  }

 private:
  __device__ static int next(int record) { return record == kAhead - 1 ? 0 : record + 1; }

  // Moves to the next KV tile; items without tokens have none. False behind the last.
  __device__ bool advance() {
    issue_cursor_.begin += kTokens;
    while (issue_cursor_.begin >= issue_cursor_.tokens) {
      if (++issue_cursor_.item >= items_.count(kWide)) return false;
      const Item& item = items_.get(kWide, issue_cursor_.item);
      issue_cursor_.begin = 0, issue_cursor_.tokens = item.tokens, issue_cursor_.head = item.kv.head;
    }
    // Each lane loads the slot of a token of its own: a uniform load would go to a uniform register, and ptxas would wait
    // for it here.
    if (issue_cursor_.at_page())
      issue_cursor_.from = p_.req_to_token[items_.get(kWide, issue_cursor_.item).slots + issue_cursor_.begin + lane_id()];
    return true;
  }

  // Issues the copies of a record, if the next tile is a page. Always one commit group.
  __device__ void issue() {
    if (issue_more_) {
      if (issue_cursor_.at_page()) {
        const int offset = int(thread()) * kCopyBytes;
        const uint32_t to = shared_address(memory_.records[issue_record_]) + offset;
        const uint8_t* const from = p_.records + uint64_t(unsigned(issue_cursor_.from) / kTokens) * p_.page_bytes +
                                    uint32_t(issue_cursor_.head * kRecord) + offset;
#pragma unroll
        for (int i = 0; i < kRecord; i += kThreads * kCopyBytes)
          if (i + kThreads * kCopyBytes <= kRecord || i + offset < kRecord) copy16(to + i, from + i);
      }
      issue_more_ = advance();
    }
    commit_copies();
    issue_record_ = next(issue_record_);
  }

  __device__ uint8_t* stage() const { return memory_.ring + cursor_.stage() * kStageBytes<kDim>; }
  __device__ void stage_full() {
    arrive(cursor_.full_barrier());
    cursor_.advance();
  }

  __device__ __forceinline__ void convert_page(const uint8_t* record) {
    cursor_.wait_empty();
    Panels::keys(record, stage());
    stage_full();
    cursor_.wait_empty();
    Panels::values(record, stage());
    stage_full();
  }

  // The `left` tokens behind the last full page. They are few, so the loads are waited for.
  __device__ __forceinline__ void convert_tail(const Item& item, int left) {
    const int column = int(thread() % kRowThreads), first = int(thread() / kRowThreads);
    const uint64_t token = uint64_t(uint32_t(p_.rows[item.query])) * kTokens + first;
#pragma unroll 1
    for (int is_v = 0; is_v < 2; ++is_v) {
      const uint32_t stride = is_v ? p_.v_slot : p_.k_slot;
      const char* from = static_cast<const char*>(is_v ? p_.v : p_.k) + item.kv.head * (is_v ? p_.v_head : p_.k_head) +
                         token * stride + column * kCopyBytes;
      cursor_.wait_empty();
#pragma unroll 4
      for (int i = 0; i < kRows; ++i) {
        // Zeros behind the end: memory may hold NaN.
        uint4 x = {};
        if (first + i * kStride < left) x = *reinterpret_cast<const uint4*>(from + uint64_t(i * kStride) * stride);
        *reinterpret_cast<uint4*>(stage() + panel_offset(first + i * kStride, column, kPanelBytes)) =
            convert_pairs<T, Product>(x);
      }
      stage_full();
    }
  }

  const Params& p_;
  const WorkItems& items_;
  Memory& memory_;
  RingCursor<kStages> cursor_;
  QueryProducer<T, Product, kDim, Memory::kBuffers, WorkItems> queries_;
  Cursor issue_cursor_;
  int at_ = 0, issue_record_ = 0;  // the record that is converted next, and the one that is copied next
  bool issue_more_ = false;
};

}  // namespace pat
