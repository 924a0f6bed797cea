#include "decode_text/long_text.hpp"
#include "engine/safetensors.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;
using host_engine::model_file_error;

struct scratch_folder {
  fs::path path = fs::temp_directory_path() / ("pulseinfer_text_" + std::to_string(std::random_device{}()));
  scratch_folder() { fs::create_directories(path); }
  scratch_folder(scratch_folder const&) = delete;
  scratch_folder& operator=(scratch_folder const&) = delete;
  ~scratch_folder()
  {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  void write(char const* name, std::string const& text) const { std::ofstream{path / name} << text; }
};

std::string message_of(auto&& call)
{
  try {
    call();
    return {};
  } catch (model_file_error const& problem) {
    return problem.what();
  }
}

bool says(std::string const& text, std::initializer_list<char const*> words)
{
  for (char const* word : words) {
    if (text.find(word) == std::string::npos) {
      MESSAGE(text << " does not say " << word);
      return false;
    }
  }
  return true;
}

}  // namespace

TEST_SUITE_BEGIN("examples/decode_text");

TEST_CASE("load_text reads what convert.py writes, and says what is wrong with anything else")
{
  scratch_folder const folder;
  nlohmann::json text{{"title", "T"}, {"source", "S"}, {"licence", "L"}, {"tokens", {3, 1, 2}}, {"continuation", 2}};
  auto const load = [&](std::string const& written) {
    folder.write("text.json", written);
    return message_of([&] { (void)decode_text::load_text(folder.path, 4); });
  };
  CHECK(load(text.dump()) == "");
  decode_text::long_text const read = decode_text::load_text(folder.path, 4);
  CHECK(read.tokens == std::vector<std::int32_t>{3, 1, 2});
  CHECK(read.continuation == 2);
  CHECK(read.title == "T");

  CHECK(says(load(text.dump().substr(0, 20)), {"text.json", "corrupt"}));
  text["continuation"] = 4;
  CHECK(says(load(text.dump()), {"token 4 of 3"}));
  text["continuation"] = 0;
  text["tokens"] = {3, 4};
  CHECK(says(load(text.dump()), {"token 1 is 4", "has 4"}));
  text["tokens"] = {-1};
  CHECK(says(load(text.dump()), {"token 0 is -1"}));
  text.erase("tokens");
  CHECK(says(load(text.dump()), {"text.json", "tokens"}));
  CHECK(says(message_of([&] { (void)decode_text::load_text(folder.path / "none", 4); }), {"cannot be opened"}));
}

TEST_CASE("vocabulary gives back each byte, those above 127 too")
{
  scratch_folder const folder;
  // As Python's json.dumps(..., ensure_ascii=False) writes the bytes of "a", " caf\xc3" and "\xa9\n".
  folder.write("vocabulary.json", "[\"a\", \" caf\xc3\x83\", \"\xc2\xa9\\n\"]");
  decode_text::vocabulary const words{folder.path};
  CHECK(words.text(std::vector<std::int32_t>{0, 1, 2}) == "a caf\xc3\xa9\n");
  CHECK(words.text(std::vector<std::int32_t>{}) == "");

  folder.write(
    "vocabulary.json", "[\"\xc4\xa0the\"]");  // U+0120, as a byte-level vocabulary itself would write a space
  CHECK(says(message_of([&] { (void)decode_text::vocabulary{folder.path}; }), {"above U+00FF"}));
  folder.write("vocabulary.json", "[1]");
  CHECK(says(message_of([&] { (void)decode_text::vocabulary{folder.path}; }), {"vocabulary.json"}));
}

TEST_SUITE_END();
