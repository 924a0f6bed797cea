#pragma once

/// Text of a file as a refusal may quote it.

#include <string>

namespace pulseinfer::detail {

/// What is no printable ASCII becomes a question mark: a zero would end the refusal, a line feed or an escape spoil it.
[[nodiscard]] inline std::string printable(std::string text)
{
  for (char& c : text) {
    if (c < ' ' || c > '~') { c = '?'; }
  }
  return text;
}

}  // namespace pulseinfer::detail
