/// Text files with something wrong in them, for readers that must refuse what they cannot read by its line.
#pragma once

#include <algorithm>
#include <cstddef>
#include <random>
#include <sstream>
#include <string>
#include <string_view>

namespace pulseinfer_test {

/// A text with one to four changes: a character that is another, missing or too much, a piece that stands twice or is missing, or
/// an end that comes too early. Half of the new characters are such as the formats themselves use.
inline std::string mutated(std::string text, std::mt19937_64& random)
{
  auto const below = [&](std::size_t limit) { return static_cast<std::size_t>(random() % limit); };
  auto const character = [&] {
    constexpr std::string_view usual = "0123456789 -,.\n\r#eE+inf";
    return below(2) == 0 ? usual[below(usual.size())] : static_cast<char>(below(256));
  };
  for (std::size_t changes = 1 + below(4); changes > 0; --changes) {
    std::size_t const at = below(text.size() + 1);
    std::size_t const length = std::min(below(24), text.size() - at);
    switch (below(6)) {
      case 0:
        if (at < text.size()) { text[at] = character(); }
        break;
      case 1: text.insert(at, 1, character()); break;
      case 2: text.erase(at, 1); break;
      case 3: text.erase(at, length); break;
      case 4: text.insert(below(text.size() + 1), text.substr(at, length)); break;
      default: text.resize(at); break;
    }
  }
  return text;
}

/// Whether a refusal names a line of the text, or the one behind its last, right behind `what`.
inline bool names_a_line(std::string_view refusal, std::string_view what, std::string const& text)
{
  std::string const begin = "invalid_argument: " + std::string{what} + ", line ";
  if (!refusal.starts_with(begin)) { return false; }
  std::size_t number = 0;
  std::istringstream{std::string{refusal.substr(begin.size())}} >> number;
  auto const lines = static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')) + 1;
  return number >= 1 && number <= lines + 1;
}

}  // namespace pulseinfer_test
