#pragma once

/// Pinned memory that grows: addresses taken at once, pages made and registered piece by piece, by any thread.

#include <pulseinfer/backend/memory_ledger.hpp>
#include <pulseinfer/backend/pinned_pages.hpp>
#include <pulseinfer/backend/reserved_pages.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace pulseinfer::detail {

/// Registers with nobody: for backends whose device reads host memory as it is.
struct no_registrar {
  [[nodiscard]] static std::string add(std::byte*, std::size_t) { return {}; }
  static void remove(std::byte*) noexcept {}
};

static_assert(page_registrar<no_registrar>);

/// Stretches of addresses of a backend, and the pieces of them that have memory.
/// @thread_safety every member may be called from any thread
class growing_memory {
 public:
  /// @return addresses for `bytes`, aligned to huge pages, without memory   @throws resource_error
  [[nodiscard]] std::byte* reserve(std::size_t bytes)
  {
    std::size_t const wanted = mapped_bytes(bytes) + huge_page_bytes;
    auto* const mapped = static_cast<std::byte*>(reserve_pages(wanted));
    if (mapped == nullptr) {
      throw resource_error{"out_of_host_memory: the system has no addresses for " + std::to_string(wanted) + " B"};
    }
    std::size_t const past = reinterpret_cast<std::uintptr_t>(mapped) % huge_page_bytes;
    std::byte* const begin = mapped + (past == 0 ? 0 : huge_page_bytes - past);
    static_cast<void>(madvise(begin, mapped_bytes(bytes), MADV_HUGEPAGE));
    std::unique_lock const lock{mutex_};
    stretches_.push_back({.mapped = mapped, .mapped_bytes = wanted, .begin = begin, .pieces = {}});
    return begin;
  }

  /// Makes the pages of a piece and registers them in chunks.   @param threads that make pages; 1: the calling one
  /// @return empty, or why not: nothing of the piece is registered then   @throws resource_error past the ledger's limit
  template <page_registrar Registrar, page_placer Placer>
  [[nodiscard]] std::string add(
    memory_ledger& ledger, Registrar& registrar, Placer& placer, int node, bool may_spill, std::size_t chunk_bytes,
    std::byte* begin, std::size_t bytes, std::size_t threads)
  {
    ledger.take(memory_space::pinned, bytes);
    static_cast<void>(place_pages(placer, begin, bytes, node, may_spill));
    touch_pages(begin, bytes, threads);
    try {
      add_chunks(registrar, begin, bytes, chunk_bytes);
    } catch (resource_error const& refused) {
      static_cast<void>(madvise(begin, bytes, MADV_DONTNEED));
      ledger.give_back(memory_space::pinned, bytes);
      return refused.what();
    }
    std::unique_lock const lock{mutex_};
    for (stretch& s : stretches_) {
      if (begin >= s.begin && begin < s.mapped + s.mapped_bytes) { s.pieces.push_back({begin, bytes, chunk_bytes}); }
    }
    return {};
  }

  /// Gives a stretch back, the last piece first.
  template <page_registrar Registrar>
  void release(memory_ledger& ledger, Registrar& registrar, std::byte* begin) noexcept
  {
    stretch gone;
    {
      std::unique_lock const lock{mutex_};
      auto const found =
        std::find_if(stretches_.begin(), stretches_.end(), [&](stretch const& s) { return s.begin == begin; });
      if (found == stretches_.end()) { return; }
      gone = std::move(*found);
      stretches_.erase(found);
    }
    for (auto last = gone.pieces.rbegin(); last != gone.pieces.rend(); ++last) {
      remove_chunks(registrar, last->begin, last->bytes, last->chunk_bytes);
      ledger.give_back(memory_space::pinned, last->bytes);
    }
    give_pages_back(gone.mapped, gone.mapped_bytes);
  }

 private:
  struct piece {
    std::byte* begin = nullptr;
    std::size_t bytes = 0;
    std::size_t chunk_bytes = 0;
  };
  struct stretch {
    std::byte* mapped = nullptr;
    std::size_t mapped_bytes = 0;
    std::byte* begin = nullptr;
    std::vector<piece> pieces;
  };

  std::mutex mutex_;
  std::vector<stretch> stretches_;
};

}  // namespace pulseinfer::detail
