// Divides the attention of one step into items: once per step, for every layer, as if no layer had
// a window. A layer with a window skips the blocks before it.
//
// The division never changes a result (kBlock), so it may depend on the whole batch: long rows are
// spread over threads, and rows that begin with the same pages (a shared prefix) are computed
// together for those pages, with each block packed once.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "step/calls.h"

// Keys per block. A query's result is the left-to-right merge of one partial result per block of
// its row's keys, whichever thread computes them, so it depends neither on the batch nor on the
// chunk nor on the number of threads.
constexpr int kBlock = 128;
// Largest number of query rows (tokens x heads of one group, of one or several sequences) that are
// computed together with a block.
constexpr int kQueryRows = 128;
// Query rows that are multiplied at a time. An item with at most this many reads K and V in place
// and takes all heads; in larger items the rows share packed copies.
constexpr int kStripRows = 6;
// Largest number of query rows whose scores are held at a time: a strip, or a tile.
constexpr int kScoreRows = 16;
// Rows with more query rows than this do not share blocks: compared with their products packing
// costs next to nothing, but keeping partial results does not.
constexpr int kSharingQueryRows = 32;

// Neighbouring tokens of one row, counted from the row's first.
struct Segment {
  int32_t row, token, tokens;
};

// One unit of work: the tokens of some segments against key blocks [block0, block1), for kv heads
// [head0, head1). All the segments' rows have the same pages there.
struct AttentionItem {
  int32_t segment0, num_segments, head0, head1, block0, block1;
  // The tokens' other blocks are in other items, so this item stores partial results (one for the
  // first blocks of a row, one per block for others); the thread that finishes a row's last item
  // merges them.
  bool partial;
};

// fp32 words of one partial: output, maximum and sum of `rows` query rows, each in whole vectors.
inline int64_t statistics_words(int64_t rows) { return (rows + 15) / 16 * 16; }
inline int64_t partial_words(int64_t rows, int64_t value_dim) {
  return rows * value_dim + 2 * statistics_words(rows);
}

struct AttentionWork {
  const Segment* segments;
  const AttentionItem* items;
  int32_t num_items;
  int32_t* open_items;           // [n] partial items of each row still to finish
  const int64_t* partial_begin;  // [n] where the row's partials [block][head] begin, in fp32 words
  const int32_t*
      merged_blocks;  // [n] leading blocks of each row whose partials are one, kept as block 0's
  float* partials;
  char* scratch;  // threads * scratch_bytes, 64-byte aligned
  int64_t scratch_bytes;
};

// Upper limits for an item: query rows of all its heads, fp32 words of their results.
inline int64_t max_query_rows(const AttentionCall& call) {
  return std::max<int64_t>(kQueryRows, kStripRows * call.num_kv_heads);
}
inline int64_t max_state_words(const AttentionCall& call) {
  return std::max(partial_words(kQueryRows, call.value_dim),
                  call.num_kv_heads * partial_words(kStripRows, call.value_dim));
}

// Words of the queries of all its heads: as rows, or as columns of which a tile holds kScoreRows.
inline int64_t query_words(const AttentionCall& call) {
  return std::max(max_query_rows(call), kScoreRows * call.num_kv_heads) * call.head_dim;
}

inline int64_t attention_scratch_bytes(const AttentionCall& call) {
  const int64_t words = kBlock * (call.head_dim + call.value_dim)  // packed K and V
                        + query_words(call)                        // queries
                        + (kScoreRows + kQueryRows) * kBlock       // scores, probabilities
                        + max_state_words(call)                    // running results
                        + 6 * kQueryRows  // of each query row: block statistics, factors, position
                        + 2 * 4 * kBlock  // addresses of K and V rows, of this block and the next
                        + 16 * 16;        // alignment
  return (words * 4 + 4095) / 4096 * 4096;
}

struct Partial {
  float* out;  // [rows, value_dim], not yet divided by sum
  float* max;  // [rows], of the scores before the last factor on them (Attention::log2_scale)
  float* sum;
};
inline Partial partial_at(float* p, int64_t rows, int64_t value_dim) {
  return {p, p + rows * value_dim, p + rows * value_dim + statistics_words(rows)};
}

class AttentionPlan {
 public:
  std::vector<Segment> segments;
  std::vector<AttentionItem> items;
  std::vector<int32_t> open_items;     // [n]
  std::vector<int64_t> partial_begin;  // [n]
  std::vector<int32_t> merged_blocks;  // [n]
  int64_t num_partial_words = 0;

  void build(const AttentionCall& call) {
    const int32_t num_rows = static_cast<int32_t>(call.rows);
    call_ = &call;
    heads_ = static_cast<int32_t>(call.num_kv_heads);
    group_ = static_cast<int32_t>(call.num_heads / call.num_kv_heads);
    tokens_per_item_ = std::max(1, kQueryRows / group_);
    segments.clear();
    items.clear();
    open_items.assign(num_rows, 0);
    partial_begin.assign(num_rows, 0);
    merged_blocks.assign(num_rows, 0);
    shared_.assign(num_rows, 0);
    num_partial_words = 0;

    std::vector<int32_t> short_rows, sharing;
    for (int32_t row = 0; row < num_rows; ++row) {
      if (tokens(row) > tokens_per_item_) {
        add_long_row(row);
        continue;
      }
      short_rows.push_back(row);
      if (query_rows(row) <= kSharingQueryRows) sharing.push_back(row);
    }
    share(sharing.data(), sharing.data() + sharing.size(), 0);
    int64_t cost = 0;
    for (const AttentionItem& item : items)
      cost += (item.block1 - item.block0) * (item.head1 - item.head0) * unit_cost(kQueryRows);
    for (int32_t row : short_rows)
      cost += (num_blocks(row) - shared_[row]) * heads_ * unit_cost(query_rows(row));
    // Eight items per thread: enough to even out, few enough to be cheap.
    const int64_t largest = call.threads == 1 ? cost : cost / (call.threads * kItemsPerThread);
    for (int32_t row : short_rows) add_short_row(row, largest);
  }

 private:
  static constexpr int32_t kItemsPerThread = 8;

  const AttentionCall* call_ = nullptr;
  int32_t heads_ = 0, group_ = 0, tokens_per_item_ = 0;
  std::vector<int32_t> shared_;  // [n] leading blocks that are computed together with other rows

  // Of one block and head: reading and turning K and V costs about as much as 8 query rows.
  static int64_t unit_cost(int64_t query_rows) { return 8 + query_rows; }
  int32_t tokens(int32_t row) const { return call_->cu_q[row + 1] - call_->cu_q[row]; }
  int32_t query_rows(int32_t row) const { return tokens(row) * group_; }
  int32_t num_blocks(int32_t row) const { return (call_->kv_lens[row] + kBlock - 1) / kBlock; }

  void add_long_row(int32_t row) {
    const int32_t count = tokens(row), before = call_->kv_lens[row] - count;
    const int32_t parts = (count + tokens_per_item_ - 1) / tokens_per_item_,
                  step = (count + parts - 1) / parts;
    // The last tokens see the most keys: longest items first.
    for (int32_t token = (count - 1) / step * step; token >= 0; token -= step) {
      const int32_t length = std::min(step, count - token),
                    blocks = (before + token + length + kBlock - 1) / kBlock;
      for (int32_t head = 0; head < heads_; ++head)
        add_item({{row, token, length}}, head, head + 1, 0, blocks, false);
    }
  }

  // Items of at most the cost `largest`: runs of blocks with all heads, which read memory in one
  // stream; one head each if there is more to do than pieces of one block, or if there are too many
  // query rows for one item.
  void add_short_row(int32_t row, int64_t largest) {
    const int32_t first = shared_[row], blocks = num_blocks(row) - first;
    if (blocks == 0) return;
    const int64_t cost = blocks * heads_ * unit_cost(query_rows(row));
    const int64_t pieces = largest ? (cost + largest - 1) / largest : cost;
    const int64_t heads =
        query_rows(row) > kStripRows
            ? 1
            : std::max<int64_t>(1, heads_ * blocks / std::max<int64_t>(pieces, blocks));
    const int64_t parts = (heads_ + heads - 1) / heads,
                  runs = std::min<int64_t>((pieces + parts - 1) / parts, blocks);
    const int32_t run = static_cast<int32_t>((blocks + runs - 1) / runs);
    for (int32_t block = first; block < first + blocks; block += run)
      for (int32_t head = 0; head < heads_; head += heads)
        add_item({{row, 0, tokens(row)}}, head,
                 static_cast<int32_t>(std::min<int64_t>(head + heads, heads_)), block,
                 std::min(block + run, first + blocks), run < blocks || first > 0);
  }

  // Items for the blocks from `block` on that at least two of the rows [begin, end), alike up to
  // there, have in common. Reorders them.
  void share(int32_t* begin, int32_t* end, int32_t block) {
    end = std::partition(begin, end, [&](int32_t row) { return is_full(row, block); });
    if (end - begin < 2) return;
    // A block's last page tells prefixes apart (a prefix tree hands out each page once); equality
    // is then verified in full.
    std::sort(begin, end,
              [&](int32_t a, int32_t b) { return last_page(a, block) < last_page(b, block); });
    while (begin < end) {
      const int32_t leader = *begin;
      int32_t* run = std::find_if(begin, end, [&](int32_t row) {
        return last_page(row, block) != last_page(leader, block);
      });
      int32_t* alike =
          std::partition(begin + 1, run, [&](int32_t row) { return is_same(row, leader, block); });
      if (alike - begin >= 2) {
        int32_t block1 = block + 1;
        while (std::all_of(begin, alike, [&](int32_t row) {
          return is_full(row, block1) && is_same(row, leader, block1);
        }))
          ++block1;
        add_shared_blocks(begin, alike, block, block1);
        share(begin, alike, block1);
      }
      begin = run;
    }
  }

  bool is_full(int32_t row, int32_t block) const {
    return (block + 1) * kBlock <= call_->kv_lens[row];
  }
  const int32_t* pages(int32_t row) const {
    return call_->page_table + call_->slots[row] * call_->table_stride;
  }
  int32_t last_page(int32_t row, int32_t block) const {
    return pages(row)[((block + 1) * static_cast<int64_t>(kBlock) - 1) / call_->page_size];
  }
  // Whether two rows have the same pages in a block that is full in both.
  bool is_same(int32_t a, int32_t b, int32_t block) const {
    const int64_t first = static_cast<int64_t>(block) * kBlock / call_->page_size;
    const int64_t last = ((block + 1) * static_cast<int64_t>(kBlock) - 1) / call_->page_size;
    return std::memcmp(pages(a) + first, pages(b) + first, (last - first + 1) * sizeof(int32_t)) ==
           0;
  }

  void add_shared_blocks(const int32_t* begin, const int32_t* end, int32_t block, int32_t block1) {
    int32_t total = 0;
    for (const int32_t* row = begin; row < end; ++row) {
      total += query_rows(*row);
      shared_[*row] = block1;
    }
    const int32_t parts = (total + kQueryRows - 1) / kQueryRows, even = (total + parts - 1) / parts;
    // As few runs of blocks as keep all threads busy: every run but the first leaves one partial
    // result per block.
    const int32_t runs =
        call_->threads == 1
            ? 1
            : std::max(1, std::min(call_->threads * kItemsPerThread / 2 / (parts * heads_),
                                   block1 - block));
    const int32_t step = (block1 - block + runs - 1) / runs;
    std::vector<Segment> together;
    int32_t held = 0;
    auto add = [&] {
      for (int32_t first = block; first < block1; first += step)
        for (int32_t head = 0; head < heads_; ++head)
          add_item(together, head, head + 1, first, std::min(first + step, block1), true);
      together.clear();
      held = 0;
    };
    for (const int32_t* row = begin; row < end; ++row) {
      const int32_t more = query_rows(*row);
      if (held && (held >= even || held + more > kQueryRows)) add();
      together.push_back({*row, 0, tokens(*row)});
      held += more;
    }
    add();
  }

  void add_item(const std::vector<Segment>& of, int32_t head0, int32_t head1, int32_t block0,
                int32_t block1, bool partial) {
    items.push_back({static_cast<int32_t>(segments.size()), static_cast<int32_t>(of.size()), head0,
                     head1, block0, block1, partial});
    segments.insert(segments.end(), of.begin(), of.end());
    if (!partial) return;
    for (const Segment& s : of) {
      if (block0 == 0) merged_blocks[s.row] = block1;
      if (open_items[s.row]++ == 0) {
        partial_begin[s.row] = num_partial_words;
        num_partial_words +=
            num_blocks(s.row) * heads_ * partial_words(s.tokens * group_, call_->value_dim);
      }
    }
  }
};
