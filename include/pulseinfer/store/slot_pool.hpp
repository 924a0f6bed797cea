#pragma once

/// The GPU memory that hot blocks lie in, our own or a host engine's.

#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/store/block_book.hpp>
#include <pulseinfer/store/device_table.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/pool.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pulseinfer {

/// Where slots lie. `lent` empty: the pool owns memory, one pool for all layers. One pointer: a lent pool for all layers.
/// A pointer per layer: lent pools, each layer numbering `slots` slots of its own.
struct slot_pool_options {
  std::uint32_t slots = 0;
  std::uint64_t slot_stride = 0;      ///< bytes from slot to slot; 0: the block's bytes
  std::vector<std::byte*> lent = {};  ///< device memory, owned by the lender, which keeps it until the pool is gone
};

/// Checks lent or owned slots: sizes, alignment, and that no byte belongs to two layers.
/// @throws configuration_error with the numbers
inline void validate(slot_pool_options const& options, std::uint32_t layers, block_layout const& layout)
{
  std::uint64_t const stride = options.slot_stride == 0 ? layout.block_bytes : options.slot_stride;
  if (options.slots == 0) { throw configuration_error{"a slot pool of 0 slots"}; }
  validate_extent(options.slots, stride);
  if (stride < layout.block_bytes) {
    throw configuration_error{
      "slot stride of " + std::to_string(stride) + " B is less than a block of " + std::to_string(layout.block_bytes) +
      " B"};
  }
  std::size_t const lent = options.lent.size();
  if (lent > 1 && lent != layers) {
    throw configuration_error{
      std::to_string(lent) + " lent pools for " + std::to_string(layers) + " layers: give one for all or one for each"};
  }
  std::uint32_t const alignment = layout.alignment == 0 ? 1 : layout.alignment;
  if (stride % alignment != 0) {
    throw configuration_error{
      "unsupported_layout: slot stride of " + std::to_string(stride) + " B, blocks need " + std::to_string(alignment) +
      " B alignment"};
  }
  auto const address = [&](std::size_t layer) { return reinterpret_cast<std::uintptr_t>(options.lent[layer]); };
  for (std::size_t layer = 0; layer < lent; ++layer) {
    if (options.lent[layer] == nullptr) {
      throw configuration_error{"layer " + std::to_string(layer) + " has no pool"};
    }
    if (address(layer) % alignment != 0) {
      throw configuration_error{
        "unsupported_layout: the pool of layer " + std::to_string(layer) + " begins " +
        std::to_string(address(layer) % alignment) + " B past a multiple of the " + std::to_string(alignment) +
        " B that blocks need"};
    }
    for (std::size_t other = 0; other < layer; ++other) {
      // Slots may interleave (a layer's slot inside a larger stride): only slots themselves must not share bytes.
      std::uint64_t const distance =
        address(layer) > address(other) ? address(layer) - address(other) : address(other) - address(layer);
      std::uint64_t const slots_apart = distance / stride;
      std::uint64_t const rest = distance % stride;
      bool const below = slots_apart < options.slots && rest < layout.block_bytes;
      bool const above = slots_apart + 1 < options.slots && stride - rest < layout.block_bytes;
      if (below || above) {
        throw configuration_error{"layer " + std::to_string(layer) + " overlaps layer " + std::to_string(other)};
      }
    }
  }
}

/// Owns the books of the slots, and their memory where it was not lent. One thread; the backend must outlive the pool.
template <class B>
class slot_pool {
 public:
  /// @throws configuration_error: see validate; resource_error from the backend
  slot_pool(B& backend, std::uint32_t layers, block_layout const& layout, slot_pool_options const& options)
    : layers_{layers},
      slots_{checked_slots(options, layers, layout)},
      stride_{options.slot_stride == 0 ? layout.block_bytes : options.slot_stride},
      per_layer_{options.lent.size() > 1},
      books_(per_layer_ ? layers : 1, block_book<slot_id>{options.slots}),
      memory_{backend, memory_space::device, options.lent.empty() ? options.slots * stride_ : 0},
      table_{backend, layers}
  {
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      table_.host()[layer] = options.lent.empty() ? memory_.data() : options.lent[per_layer_ ? layer : 0];
    }
    table_.publish(backend);
  }

  slot_pool(slot_pool&&) = delete;

  /// Takes a slot of the layer. @return none where none is free
  [[nodiscard]] slot_id acquire(layer_id layer, slot_id hint = none<slot_id>) noexcept
  {
    return contains(layer) ? book(layer).acquire(hint) : none<slot_id>;
  }

  /// @return out_of_range, or invalid_state for a double release, which changes nothing and is told by refused_release()
  status release(layer_id layer, slot_id slot) noexcept
  {
    return contains(layer) ? book(layer).release(slot) : status::out_of_range;
  }

  /// A copy names the slot: it isn't given to anybody else before the copy's unpin, whoever releases it meanwhile.
  status pin(layer_id layer, slot_id slot) noexcept
  {
    return contains(layer) ? book(layer).pin(slot) : status::out_of_range;
  }
  status unpin(layer_id layer, slot_id slot) noexcept
  {
    return contains(layer) ? book(layer).unpin(slot) : status::out_of_range;
  }

  /// Slots that acquire could give for this layer; all layers share them where the pool is not per layer.
  [[nodiscard]] std::uint32_t free_slots(layer_id layer) const noexcept
  {
    return contains(layer) ? book(layer).available() : 0;
  }
  /// Free slots of all layers together.
  [[nodiscard]] std::uint64_t free_slots() const noexcept
  {
    std::uint64_t sum = 0;
    for (block_book<slot_id> const& book : books_) { sum += book.available(); }
    return sum;
  }
  /// Slots of all layers together.
  [[nodiscard]] std::uint64_t total_slots() const noexcept { return std::uint64_t{slots_} * books_.size(); }
  [[nodiscard]] bool per_layer() const noexcept { return per_layer_; }
  [[nodiscard]] block_counts counts(layer_id layer) const noexcept { return book(layer).counts(); }
  [[nodiscard]] std::uint32_t pins(layer_id layer, slot_id slot) const noexcept { return book(layer).pins(slot); }
  /// Whether nobody has the slot and no copy names it.
  [[nodiscard]] bool is_free(layer_id layer, slot_id slot) const noexcept
  {
    return book(layer).references(slot) == 0 && book(layer).pins(slot) == 0;
  }
  [[nodiscard]] std::uint64_t allocated_bytes() const noexcept { return memory_.bytes(); }
  [[nodiscard]] std::string refused_release(layer_id layer) const { return book(layer).refused_release(); }

  [[nodiscard]] slot_pool_ref ref() const noexcept
  {
    return {
      .layer_base = table_.host(),
      .device_layer_base = table_.device(),
      .slot_stride = stride_,
      .slots = slots_,
      .per_layer = per_layer_};
  }

  /// @return what is wrong with the books, empty where nothing is
  [[nodiscard]] std::string audit() const
  {
    for (std::size_t i = 0; i < books_.size(); ++i) {
      if (std::string const text = books_[i].audit(); !text.empty()) {
        return (per_layer_ ? "slot pool of layer " + std::to_string(i) : std::string{"slot pool"}) + ": " + text;
      }
    }
    return {};
  }

 private:
  [[nodiscard]] static std::uint32_t checked_slots(
    slot_pool_options const& options, std::uint32_t layers, block_layout const& layout)
  {
    validate(options, layers, layout);
    return options.slots;
  }

  [[nodiscard]] bool contains(layer_id layer) const noexcept { return !is_none(layer) && to_index(layer) < layers_; }
  [[nodiscard]] block_book<slot_id>& book(layer_id layer) noexcept { return books_[per_layer_ ? to_index(layer) : 0]; }
  [[nodiscard]] block_book<slot_id> const& book(layer_id layer) const noexcept
  {
    return books_[per_layer_ ? to_index(layer) : 0];
  }

  std::uint32_t layers_;
  std::uint32_t slots_;
  std::uint64_t stride_;
  bool per_layer_;
  std::vector<block_book<slot_id>> books_;  // one, or one a layer
  slab<B> memory_;                          // [slots], empty where lent
  device_table<std::byte*, B> table_;       // [layers] begin of each layer's slots
};

}  // namespace pulseinfer
