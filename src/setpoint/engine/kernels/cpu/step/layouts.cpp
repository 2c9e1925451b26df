// The layouts of calls.h as text, for Python to compare with its own (calls.py): a field that moves
// in one of the two would otherwise be read where it no longer is.
#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>

#include "step/calls.h"

namespace {

struct Field {
  const char* name;
  char kind;  // p: a pointer, f: a floating point number, i: an integer
  size_t offset, size;
};

template <class T>
constexpr char kind_of() {
  return std::is_pointer<T>::value ? 'p' : std::is_floating_point<T>::value ? 'f' : 'i';
}

// Whether a Call can be made of as many values as there are indices: has so many fields, or more.
struct Anything {
  size_t index;
  template <class T>
  operator T() const;
};
template <class Call, class Indices, class = void>
struct HasFields : std::false_type {};
template <class Call, size_t... kIndices>
struct HasFields<Call, std::index_sequence<kIndices...>,
                 std::void_t<decltype(Call{Anything{kIndices}...})>> : std::true_type {};

void add_lines(std::string& text, const std::string& name, size_t size, const Field* fields,
               size_t count) {
  text += name + " " + std::to_string(size) + "\n";
  for (const Field* field = fields; field < fields + count; ++field)
    text += name + "." + field->name + " " + field->kind + " " + std::to_string(field->offset) +
            " " + std::to_string(field->size) + "\n";
}

template <class Call, size_t kCount>
void add(std::string& text, const char* name, const Field (&fields)[kCount]) {
  static_assert(!HasFields<Call, std::make_index_sequence<kCount + 1>>::value, "list every field");
  add_lines(text, name, sizeof(Call), fields, kCount);
}

#define FIELD(name) \
  Field { #name, kind_of<decltype(Call::name)>(), offsetof(Call, name), sizeof(Call::name) }

std::string layouts() {
  std::string text;
  {
    typedef PlaceCall Call;
    add<Call>(text, "PlaceCall",
              {FIELD(slots), FIELD(cu_q), FIELD(kv_lens), FIELD(known), FIELD(page_table),
               FIELD(ids), FIELD(positions), FIELD(kv_index), FIELD(rows), FIELD(known_stride),
               FIELD(table_stride), FIELD(page_size)});
  }
  {
    typedef EmbeddingCall Call;
    add<Call>(text, "EmbeddingCall",
              {FIELD(ids), FIELD(weight), FIELD(out), FIELD(rows), FIELD(cols), FIELD(scale),
               FIELD(dtype), FIELD(threads)});
  }
  {
    typedef BlockRowsCall Call;
    add<Call>(text, "BlockRowsCall",
              {FIELD(ids), FIELD(weight), FIELD(out), FIELD(rows), FIELD(blocks), FIELD(scale),
               FIELD(kind), FIELD(threads)});
  }
  {
    typedef NormCall Call;
    add<Call>(
        text, "NormCall",
        {FIELD(x), FIELD(residual), FIELD(weight), FIELD(out), FIELD(rows), FIELD(cols),
         FIELD(group), FIELD(stride), FIELD(eps), FIELD(offset), FIELD(dtype), FIELD(threads)});
  }
  {
    typedef LinearCall Call;
    add<Call>(text, "LinearCall",
              {FIELD(x), FIELD(weight), FIELD(bias), FIELD(out), FIELD(rows), FIELD(columns),
               FIELD(k_words), FIELD(out_row), FIELD(alpha), FIELD(limit), FIELD(dtype),
               FIELD(gate), FIELD(blocks), FIELD(rounded), FIELD(threads)});
  }
  {
    typedef Int8LinearCall Call;
    add<Call>(text, "Int8LinearCall",
              {FIELD(x), FIELD(weight), FIELD(scales), FIELD(shifts), FIELD(bias), FIELD(out),
               FIELD(rows), FIELD(columns), FIELD(k), FIELD(k_words), FIELD(alpha), FIELD(limit),
               FIELD(x_scale), FIELD(rotated), FIELD(dtype), FIELD(gate), FIELD(threads)});
  }
  {
    typedef RouteCall Call;
    add<Call>(text, "RouteCall",
              {FIELD(logits), FIELD(ids), FIELD(weights), FIELD(correction), FIELD(rows),
               FIELD(experts), FIELD(chosen), FIELD(groups), FIELD(open), FIELD(best),
               FIELD(scaling), FIELD(scoring), FIELD(normalise), FIELD(dtype), FIELD(threads)});
  }
  {
    typedef PlaceExpertsCall Call;
    add<Call>(text, "PlaceExpertsCall",
              {FIELD(ids), FIELD(positions), FIELD(places), FIELD(slots), FIELD(load), FIELD(rows),
               FIELD(chosen), FIELD(width)});
  }
  {
    typedef ExpertsCall Call;
    add<Call>(text, "ExpertsCall",
              {FIELD(weights), FIELD(ids), FIELD(x), FIELD(out), FIELD(rows), FIELD(pairs_per_row),
               FIELD(first), FIELD(experts), FIELD(x_bytes), FIELD(out_bytes), FIELD(is_int8),
               FIELD(threads)});
  }
  {
    typedef HeadsCall Call;
    add<Call>(text, "HeadsCall",
              {FIELD(weights), FIELD(x), FIELD(out), FIELD(rows), FIELD(heads), FIELD(x_bytes),
               FIELD(x_row), FIELD(x_head), FIELD(out_bytes), FIELD(threads)});
  }
  {
    typedef CombineCall Call;
    add<Call>(text, "CombineCall",
              {FIELD(parts), FIELD(weights), FIELD(shared), FIELD(gate), FIELD(out), FIELD(rows),
               FIELD(chosen), FIELD(cols), FIELD(dtype), FIELD(threads)});
  }
  {
    typedef GatedCall Call;
    add<Call>(text, "GatedCall",
              {FIELD(gate_up), FIELD(out), FIELD(rows), FIELD(cols), FIELD(alpha), FIELD(limit),
               FIELD(dtype), FIELD(threads)});
  }
  {
    typedef SoftCapCall Call;
    add<Call>(text, "SoftCapCall",
              {FIELD(x), FIELD(rows), FIELD(cols), FIELD(cap), FIELD(dtype), FIELD(threads)});
  }
  {
    typedef RopeCall Call;
    add<Call>(text, "RopeCall",
              {FIELD(q),
               FIELD(k),
               FIELD(v),
               FIELD(cos_sin),
               FIELD(positions),
               FIELD(k_cache),
               FIELD(v_cache),
               FIELD(kv_index),
               FIELD(rows),
               FIELD(num_heads),
               FIELD(num_kv_heads),
               FIELD(head_dim),
               FIELD(rotary_dim),
               FIELD(q_stride),
               FIELD(k_stride),
               FIELD(v_stride),
               FIELD(k_scale),
               FIELD(v_scale),
               FIELD(dtype),
               FIELD(kv_dtype),
               FIELD(threads)});
  }
  {
    typedef LatentRopeCall Call;
    add<Call>(
        text, "LatentRopeCall",
        {FIELD(q_latent), FIELD(q_rope),    FIELD(latent),      FIELD(k_rope),   FIELD(q),
         FIELD(cos_sin),  FIELD(positions), FIELD(cache),       FIELD(kv_index), FIELD(rows),
         FIELD(heads),    FIELD(rank),      FIELD(rope),        FIELD(q_row),    FIELD(q_head),
         FIELD(k_row),    FIELD(scale),     FIELD(interleaved), FIELD(dtype),    FIELD(kv_dtype),
         FIELD(threads)});
  }
  {
    typedef AttentionCall Call;
    add<Call>(text, "AttentionCall",
              {FIELD(plan),         FIELD(q),         FIELD(out),          FIELD(k_cache),
               FIELD(v_cache),      FIELD(cu_q),      FIELD(kv_lens),      FIELD(slots),
               FIELD(page_table),   FIELD(sinks),     FIELD(rows),         FIELD(q_stride),
               FIELD(table_stride), FIELD(num_heads), FIELD(num_kv_heads), FIELD(head_dim),
               FIELD(page_size),    FIELD(value_dim), FIELD(value_stride), FIELD(window),
               FIELD(scale),        FIELD(softcap),   FIELD(v_scale),      FIELD(q_dtype),
               FIELD(kv_dtype),     FIELD(threads)});
  }
  {
    typedef BestCall Call;
    add<Call>(text, "BestCall",
              {FIELD(logits), FIELD(out), FIELD(rows), FIELD(cols), FIELD(dtype), FIELD(threads)});
  }
  {
    typedef TopCall Call;
    add<Call>(text, "TopCall",
              {FIELD(logits), FIELD(out), FIELD(rows), FIELD(cols), FIELD(count), FIELD(dtype),
               FIELD(threads)});
  }
  {
    typedef MaskCall Call;
    add<Call>(text, "MaskCall",
              {FIELD(logits), FIELD(which), FIELD(words), FIELD(rows), FIELD(cols),
               FIELD(words_per_row), FIELD(dtype), FIELD(threads)});
  }
  {
    typedef GatherCall Call;
    add<Call>(text, "GatherCall",
              {FIELD(ranks), FIELD(x), FIELD(out), FIELD(begins), FIELD(rows), FIELD(element_bytes),
               FIELD(first_only), FIELD(threads)});
  }
  {
    typedef GatherRowsCall Call;
    add<Call>(text, "GatherRowsCall",
              {FIELD(ranks), FIELD(ids), FIELD(x), FIELD(out), FIELD(rows), FIELD(row_bytes),
               FIELD(first), FIELD(count), FIELD(threads)});
  }
  {
    typedef GatherTokensCall Call;
    add<Call>(text, "GatherTokensCall",
              {FIELD(ranks), FIELD(x), FIELD(out), FIELD(rows), FIELD(row_bytes), FIELD(threads)});
  }
  {
    typedef OwnTokensCall Call;
    add<Call>(text, "OwnTokensCall",
              {FIELD(ranks), FIELD(x), FIELD(out), FIELD(rows), FIELD(row_bytes), FIELD(threads)});
  }
  {
    typedef OwnIdsCall Call;
    add<Call>(text, "OwnIdsCall",
              {FIELD(ids), FIELD(out), FIELD(rows), FIELD(first), FIELD(count)});
  }
  {
    typedef ProgramOp Call;
    add<Call>(
        text, "ProgramOp",
        {FIELD(kernel), FIELD(call), FIELD(rows), FIELD(per_count), FIELD(counts), FIELD(kind)});
  }
  {
    typedef ProgramCall Call;
    add<Call>(text, "ProgramCall",
              {FIELD(ops), FIELD(counts), FIELD(nanoseconds), FIELD(num_ops), FIELD(threads)});
  }
  return text;
}

}  // namespace

// A line for each struct, "NAME SIZE", and after it one for each field, "NAME.FIELD KIND OFFSET
// SIZE".
extern "C" const char* setpoint_layouts() {
  static const std::string text = layouts();
  return text.c_str();
}
