#pragma once

/// Large pinned host memory: pages of the system's own, touched in parallel, registered with the device in chunks.

#include <pulseinfer/error.hpp>

#include <algorithm>
#include <cerrno>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <pthread.h>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pulseinfer::detail {

/// Makes memory known to a device's driver. @return empty, or the driver's own words for why not
template <class R>
concept page_registrar = requires(R& registrar, std::byte* memory, std::size_t bytes) {
  { registrar.add(memory, bytes) } -> std::same_as<std::string>;
  { registrar.remove(memory) } noexcept;
};

/// Asks for pages on a memory node before they are made. @return empty, or why not
template <class P>
concept page_placer = requires(P& placer, std::byte* memory, std::size_t bytes, int node, bool may_spill) {
  { placer.place(memory, bytes, node, may_spill) } -> std::same_as<std::string>;
};

inline constexpr int unknown_node = -1;

/// Where a pool's pages lie, as far as is known.
struct page_placement {
  int node = unknown_node;
  std::string warning =
    {};  ///< why they could not be asked for on the wanted node; empty where they were, or none was wanted
};

/// Asks for `bytes` on `node`; a refusal costs the nearness and nothing else.
/// @param node unknown_node: wherever the touching threads run
/// @param may_spill pages that do not fit on the node come from others; else the system has to refuse them
template <page_placer Placer>
[[nodiscard]] page_placement place_pages(Placer& placer, std::byte* memory, std::size_t bytes, int node, bool may_spill)
{
  if (node == unknown_node) { return {}; }
  std::string const refusal = placer.place(memory, bytes, node, may_spill);
  if (refusal.empty()) { return {.node = node}; }
  return {
    .warning =
      std::to_string(bytes) + " B of host memory are not bound to node " + std::to_string(node) + ": " + refusal};
}

/// Asks Linux.
struct system_page_placer {
  [[nodiscard]] static std::string place(std::byte* memory, std::size_t bytes, int node, bool may_spill)
  {
    constexpr std::size_t nodes = 1024;
    constexpr std::size_t bits = 8 * sizeof(unsigned long);
    if (node < 0 || static_cast<std::size_t>(node) >= nodes) { return "no such node"; }
    unsigned long mask[nodes / bits] = {};
    mask[static_cast<std::size_t>(node) / bits] = 1UL << (static_cast<std::size_t>(node) % bits);
    constexpr int preferred = 1, bound = 2;  // MPOL_PREFERRED and MPOL_BIND of linux/mempolicy.h
    if (syscall(SYS_mbind, memory, bytes, may_spill ? preferred : bound, mask, nodes, 0UL) == 0) { return {}; }
    return std::strerror(errno);
  }
};

static_assert(page_placer<system_page_placer>);

/// The memory node that a PCI device is attached to, as the system says it. @param address as "0000:1b:00.0"
/// @return unknown_node where the machine has one node or does not say
[[nodiscard]] inline int node_of_device(std::string address, std::string const& devices = "/sys/bus/pci/devices")
{
  for (char& c : address) {
    if (c >= 'A' && c <= 'F') { c = static_cast<char>(c - 'A' + 'a'); }
  }
  std::FILE* const file = std::fopen((devices + "/" + address + "/numa_node").c_str(), "r");
  if (file == nullptr) { return unknown_node; }
  int node = unknown_node;
  if (std::fscanf(file, "%d", &node) != 1 || node < 0) { node = unknown_node; }
  std::fclose(file);
  return node;
}

/// Gives the chunks of `bytes` back, the last one first.
template <page_registrar Registrar>
void remove_chunks(Registrar& registrar, std::byte* memory, std::size_t bytes, std::size_t chunk_bytes) noexcept
{
  for (std::size_t end = bytes; end > 0;) {
    std::size_t const begin = (end - 1) / chunk_bytes * chunk_bytes;
    registrar.remove(memory + begin);
    end = begin;
  }
}

/// Registers `bytes` in pieces of `chunk_bytes`, of which the last may be smaller. On a refusal nothing stays registered.
/// @throws resource_error: how much was pinned, which chunk failed, the driver's words
template <page_registrar Registrar>
void add_chunks(Registrar& registrar, std::byte* memory, std::size_t bytes, std::size_t chunk_bytes)
{
  std::size_t const chunks = (bytes + chunk_bytes - 1) / chunk_bytes;
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    std::size_t const begin = chunk * chunk_bytes;
    std::string const refusal = registrar.add(memory + begin, std::min(chunk_bytes, bytes - begin));
    if (refusal.empty()) { continue; }
    remove_chunks(registrar, memory, begin, chunk_bytes);
    throw resource_error{
      "pinning_refused: " + std::to_string(begin) + " of " + std::to_string(bytes) + " B pinned, chunk " +
      std::to_string(chunk + 1) + " of " + std::to_string(chunks) + " failed: " + refusal};
  }
}

/// What the system lets a process lock, for a message; empty where there is no limit.
[[nodiscard]] inline std::string locked_memory_limit()
{
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) { return {}; }
  return "the process may lock " + std::to_string(limit.rlim_cur) + " B (ulimit -l)";
}

inline constexpr std::size_t huge_page_bytes = std::size_t{2} << 20U;

/// Bytes that a mapping of `bytes` takes: whole huge pages.
[[nodiscard]] constexpr std::size_t mapped_bytes(std::size_t bytes) noexcept
{
  return (bytes + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes;
}

/// A part of a mapping that one thread writes to.
struct touched_part {
  std::byte* begin = nullptr;
  std::byte* end = nullptr;

  static void* touch(void* argument) noexcept
  {
    auto const& part = *static_cast<touched_part const*>(argument);
    for (std::byte* at = part.begin; at < part.end; at += 4096) {
      *static_cast<std::byte volatile*>(at) = std::byte{0};
    }
    return nullptr;
  }
};

inline constexpr std::size_t most_touching_threads = 16;

/// Writes to every page, from several threads.   @param bytes whole huge pages   @param most threads, 1 to most_touching_threads
inline void touch_pages(std::byte* memory, std::size_t bytes, std::size_t most) noexcept
{
  long const processors = sysconf(_SC_NPROCESSORS_ONLN);
  std::size_t const pages = bytes / huge_page_bytes;
  std::size_t const count = std::min({pages, most, static_cast<std::size_t>(std::max(1L, processors))});
  touched_part parts[most_touching_threads];
  pthread_t threads[most_touching_threads];
  std::size_t started = 0;
  for (std::size_t i = 0; i < count; ++i) {
    parts[i] = {memory + pages * i / count * huge_page_bytes, memory + pages * (i + 1) / count * huge_page_bytes};
    if (i + 1 == count || pthread_create(&threads[started], nullptr, &touched_part::touch, &parts[i]) != 0) {
      touched_part::touch(&parts[i]);
    } else {
      ++started;
    }
  }
  for (std::size_t i = 0; i < started; ++i) { static_cast<void>(pthread_join(threads[i], nullptr)); }
}

/// Maps memory on huge pages where the system has them, and writes to every page from several threads, so that pages exist
/// before they are pinned: much faster than letting a driver make them one by one. They lie on the node that is asked for, else
/// near the threads that touch them.
/// @param placed written   @return aligned to huge pages; mapped_bytes(bytes) long   @throws resource_error
template <page_placer Placer>
[[nodiscard]] std::byte* map_pages(std::size_t bytes, Placer& placer, int node, bool may_spill, page_placement& placed)
{
  std::size_t const wanted = mapped_bytes(bytes);
  void* const mapped =
    mmap(nullptr, wanted + huge_page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    throw resource_error{"out_of_host_memory: the system does not map " + std::to_string(wanted) + " B"};
  }
  std::size_t const before =
    (huge_page_bytes - reinterpret_cast<std::uintptr_t>(mapped) % huge_page_bytes) % huge_page_bytes;
  auto* const memory = static_cast<std::byte*>(mapped) + before;
  if (before > 0) { static_cast<void>(munmap(mapped, before)); }
  if (before < huge_page_bytes) { static_cast<void>(munmap(memory + wanted, huge_page_bytes - before)); }
  static_cast<void>(madvise(memory, wanted, MADV_HUGEPAGE));
  placed = place_pages(placer, memory, wanted, node, may_spill);

  touch_pages(memory, wanted, most_touching_threads);
  return memory;
}

[[nodiscard]] inline std::byte* map_pages(std::size_t bytes)
{
  system_page_placer placer;
  page_placement placed;
  return map_pages(bytes, placer, unknown_node, true, placed);
}

inline void unmap_pages(std::byte* memory, std::size_t bytes) noexcept
{
  static_cast<void>(munmap(memory, mapped_bytes(bytes)));
}

/// Large pinned memory: mapped and registered here, or from elsewhere.
struct pinned_memory {
  std::byte* begin = nullptr;
  bool mapped = true;
};

/// Maps, touches and registers `bytes`. Where the registration is refused (a limit on locked memory, for one), takes what
/// `other()` gives instead, and says so in `placed.warning`.
/// @param other returns memory that needs no registration, or nullptr   @param placed written
/// @throws resource_error: the refusal, where `other` has nothing either
template <page_registrar Registrar, page_placer Placer, class Other>
[[nodiscard]] pinned_memory take_pinned(
  Registrar& registrar, Placer& placer, std::size_t bytes, std::size_t chunk_bytes, int node, bool may_spill,
  page_placement& placed, Other other)
{
  std::byte* const memory = map_pages(bytes, placer, node, may_spill, placed);
  std::string refusal;
  try {
    add_chunks(registrar, memory, mapped_bytes(bytes), chunk_bytes);
    return {.begin = memory};
  } catch (resource_error const& refused) {
    refusal = refused.what();
  } catch (...) {
    unmap_pages(memory, bytes);
    throw;
  }
  unmap_pages(memory, bytes);
  std::byte* const given = other();
  if (given == nullptr) { throw resource_error{refusal}; }
  placed = {
    .warning = refusal + "; the runtime's own allocation took its place, made on whatever node and in small pages"};
  return {.begin = given, .mapped = false};
}

}  // namespace pulseinfer::detail
