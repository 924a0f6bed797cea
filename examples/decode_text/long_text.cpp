#include "long_text.hpp"

#include "engine/safetensors.hpp"

#include <nlohmann/json.hpp>

#include <fstream>

namespace decode_text {
namespace {

nlohmann::json read_json(std::filesystem::path const& path)
{
  std::ifstream stream{path};
  if (!stream) throw host_engine::model_file_error{path.string() + ": cannot be opened"};
  try {
    return nlohmann::json::parse(stream);
  } catch (nlohmann::json::exception const& problem) {
    throw host_engine::model_file_error{path.string() + ": is corrupt: " + problem.what()};
  }
}

// The file writes one character U+0000 to U+00FF for each byte; JSON text is UTF-8.
std::string bytes_of(std::string const& text, std::filesystem::path const& path)
{
  std::string bytes;
  for (std::size_t at = 0; at < text.size(); ++at) {
    auto const lead = static_cast<unsigned char>(text[at]);
    if (lead < 0x80) {
      bytes += text[at];
    } else if ((lead == 0xC2 || lead == 0xC3) && at + 1 < text.size()) {
      bytes += static_cast<char>((lead & 0x03) << 6 | (static_cast<unsigned char>(text[++at]) & 0x3F));
    } else {
      throw host_engine::model_file_error{
        path.string() + ": a token has a character above U+00FF at byte " + std::to_string(at)};
    }
  }
  return bytes;
}

}  // namespace

long_text load_text(std::filesystem::path const& folder, std::uint32_t vocabulary)
{
  std::filesystem::path const path = folder / "text.json";
  nlohmann::json const json = read_json(path);
  long_text text;
  try {
    text = {
      .title = json.at("title").get<std::string>(),
      .source = json.at("source").get<std::string>(),
      .licence = json.at("licence").get<std::string>(),
      .tokens = json.at("tokens").get<std::vector<std::int32_t>>(),
      .continuation = json.at("continuation").get<std::uint32_t>()};
  } catch (nlohmann::json::exception const& problem) {
    throw host_engine::model_file_error{path.string() + ": is not a text of token ids: " + problem.what()};
  }
  if (text.continuation > text.tokens.size()) {
    throw host_engine::model_file_error{
      path.string() + ": the continuation begins at token " + std::to_string(text.continuation) + " of " +
      std::to_string(text.tokens.size())};
  }
  for (std::size_t at = 0; at < text.tokens.size(); ++at) {
    if (text.tokens[at] < 0 || static_cast<std::uint32_t>(text.tokens[at]) >= vocabulary) {
      throw host_engine::model_file_error{
        path.string() + ": token " + std::to_string(at) + " is " + std::to_string(text.tokens[at]) +
        ", the model's vocabulary has " + std::to_string(vocabulary)};
    }
  }
  return text;
}

vocabulary::vocabulary(std::filesystem::path const& folder)
{
  std::filesystem::path const path = folder / "vocabulary.json";
  nlohmann::json const json = read_json(path);
  try {
    for (auto const& token : json) bytes_.push_back(bytes_of(token.get<std::string>(), path));
  } catch (nlohmann::json::exception const& problem) {
    throw host_engine::model_file_error{path.string() + ": is not a list of tokens: " + problem.what()};
  }
}

std::string vocabulary::text(std::span<std::int32_t const> tokens) const
{
  std::string joined;
  for (std::int32_t const token : tokens) joined += bytes_.at(static_cast<std::size_t>(token));
  return joined;
}

}  // namespace decode_text
