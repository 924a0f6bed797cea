/// The text that is decoded, as token ids, and the bytes that each token stands for.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace decode_text {

struct long_text {
  std::string title, source, licence;
  std::vector<std::int32_t> tokens;
  std::uint32_t continuation = 0;  // the first token after the prompt
};

/// Reads text.json as convert.py writes it.
/// @throws host_engine::model_file_error also if a token is not in the vocabulary
[[nodiscard]] long_text load_text(std::filesystem::path const& folder, std::uint32_t vocabulary);

class vocabulary {
 public:
  /// Reads vocabulary.json as convert.py writes it.
  /// @throws host_engine::model_file_error
  explicit vocabulary(std::filesystem::path const& folder);

  /// The bytes of these tokens; a character may begin in one token and end in the next.
  [[nodiscard]] std::string text(std::span<std::int32_t const> tokens) const;

 private:
  std::vector<std::string> bytes_;
};

}  // namespace decode_text
