#include "engine/crc32.hpp"
#include "engine/llama_weights.hpp"
#include "engine/safetensors.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;
using host_engine::model_file_error, host_engine::safetensors_file;

// A folder of the test's own that goes with it.
struct scratch_folder {
  fs::path path = fs::temp_directory_path() / ("pulseinfer_safetensors_" + std::to_string(std::random_device{}()));
  scratch_folder() { fs::create_directories(path); }
  scratch_folder(scratch_folder const&) = delete;
  scratch_folder& operator=(scratch_folder const&) = delete;
  ~scratch_folder()
  {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

void write_bytes(fs::path const& path, std::string const& bytes) { std::ofstream{path, std::ios::binary} << bytes; }

std::string file_bytes(std::string const& header, std::string const& data)
{
  std::uint64_t const length = header.size();
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + header + data;
}

std::string bytes_of(std::vector<float> const& values)
{
  std::string bytes(values.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Two tensors: "a" [2, 3] with 1 to 6, "b" [2] with 7 and 8.
nlohmann::json two_tensors()
{
  return {
    {"a", {{"dtype", "F32"}, {"shape", {2, 3}}, {"data_offsets", {0, 24}}}},
    {"b", {{"dtype", "F32"}, {"shape", {2}}, {"data_offsets", {24, 32}}}}};
}
std::string const two_tensors_data = bytes_of({1, 2, 3, 4, 5, 6, 7, 8});

// Opens the file, reads "a" and returns the error's text; empty if there was none.
std::string error_of(fs::path const& path)
{
  try {
    safetensors_file const file{path};
    std::vector<float> a(6);
    file.read("a", std::array<std::uint64_t, 2>{2, 3}, a);
    return {};
  } catch (model_file_error const& problem) {
    return problem.what();
  }
}

void check_says(std::string const& text, std::initializer_list<char const*> words)
{
  for (char const* word : words) {
    CAPTURE(text);
    CAPTURE(word);
    CHECK(text.find(word) != std::string::npos);
  }
}

}  // namespace

TEST_SUITE_BEGIN("examples/engine");

TEST_CASE("safetensors_file reads what was written")
{
  scratch_folder const folder;
  fs::path const path = folder.path / "model.safetensors";
  write_bytes(path, file_bytes(two_tensors().dump(), two_tensors_data));
  safetensors_file const file{path};
  CHECK(file.tensors().size() == 2);
  std::vector<float> a(6), b(2);
  file.read("a", std::array<std::uint64_t, 2>{2, 3}, a);
  file.read("b", std::array<std::uint64_t, 1>{2}, b);
  CHECK(a == std::vector<float>{1, 2, 3, 4, 5, 6});
  CHECK(b == std::vector<float>{7, 8});
}

TEST_CASE("safetensors_file says how much of a file is missing, wherever it was cut")
{
  scratch_folder const folder;
  fs::path const path = folder.path / "model.safetensors";
  std::string const header = two_tensors().dump();
  std::string const whole = file_bytes(header, two_tensors_data);
  for (std::size_t length = 0; length < whole.size(); ++length) {
    write_bytes(path, whole.substr(0, length));
    std::string const text = error_of(path);
    CAPTURE(length);
    if (length < 8) {
      check_says(text, {"truncated", "8 bytes", std::to_string(length).c_str()});
    } else if (length < 8 + header.size()) {
      check_says(text, {"truncated", std::to_string(header.size()).c_str(), std::to_string(length - 8).c_str()});
    } else {
      check_says(text, {"truncated", "32", std::to_string(length - 8 - header.size()).c_str()});
    }
  }
}

TEST_CASE("safetensors_file refuses data after the last tensor")
{
  scratch_folder const folder;
  fs::path const path = folder.path / "model.safetensors";
  write_bytes(path, file_bytes(two_tensors().dump(), two_tensors_data + "xyz"));
  check_says(error_of(path), {"corrupt", "32", "35"});
}

TEST_CASE("safetensors_file refuses a header that does not add up")
{
  scratch_folder const folder;
  fs::path const path = folder.path / "model.safetensors";
  auto const error_of_header = [&](std::string const& header) {
    write_bytes(path, file_bytes(header, two_tensors_data));
    return error_of(path);
  };

  SUBCASE("no JSON") { check_says(error_of_header("{\"a\": nonsense}"), {"15 bytes", "corrupt"}); }
  SUBCASE("a tensor without a shape")
  {
    nlohmann::json header = two_tensors();
    header["a"].erase("shape");
    check_says(error_of_header(header.dump()), {"corrupt", "shape"});
  }
  SUBCASE("a place of another size than the shape's")
  {
    nlohmann::json header = two_tensors();
    header["a"]["shape"] = {2, 4};
    check_says(error_of_header(header.dump()), {"tensor a", "[2, 4]", "32 bytes", "0 to 24"});
  }
  SUBCASE("a place that ends before it begins")
  {
    nlohmann::json header = two_tensors();
    header["a"]["data_offsets"] = {24, 0};
    check_says(error_of_header(header.dump()), {"tensor a", "24 to 0"});
  }
  SUBCASE("sizes whose product passes 64 bits")
  {
    nlohmann::json header = two_tensors();
    header["a"]["shape"] = {std::uint64_t{1} << 33, std::uint64_t{1} << 33};
    check_says(error_of_header(header.dump()), {"tensor a", "2^64"});
  }
  SUBCASE("negative sizes")
  {
    nlohmann::json header = two_tensors();
    header["a"]["shape"] = {-2, -3};
    CHECK(!error_of_header(header.dump()).empty());
  }
  SUBCASE("an unknown type")
  {
    nlohmann::json header = two_tensors();
    header["a"]["dtype"] = "F31";
    check_says(error_of_header(header.dump()), {"tensor a", "F31"});
  }
  SUBCASE("a length that no header has")
  {
    write_bytes(path, std::string(40, '\xff'));
    check_says(error_of(path), {"18446744073709551615", "32"});
  }
}

TEST_CASE("safetensors_file compares each tensor with its checksum")
{
  scratch_folder const folder;
  fs::path const path = folder.path / "model.safetensors";
  nlohmann::json header = two_tensors();
  header["__metadata__"] = {{"format", "pt"}, {"crc32.a", "1939e524"}};  // of the right bytes: Python's zlib.crc32
  write_bytes(path, file_bytes(header.dump(), two_tensors_data));
  CHECK(error_of(path) == "");

  for (std::size_t const bit : {0U, 100U, 191U}) {
    std::string data = two_tensors_data;
    data[bit / 8] = static_cast<char>(data[bit / 8] ^ 1 << bit % 8);
    write_bytes(path, file_bytes(header.dump(), data));
    check_says(error_of(path), {"tensor a", "corrupt", "24 bytes", "1939e524"});
  }
}

TEST_CASE("safetensors_file::read says which tensor is not the expected one, and how")
{
  scratch_folder const folder;
  fs::path const path = folder.path / "model.safetensors";
  nlohmann::json header = two_tensors();
  header["b"] = {{"dtype", "F16"}, {"shape", {4}}, {"data_offsets", {24, 32}}};
  write_bytes(path, file_bytes(header.dump(), two_tensors_data));
  safetensors_file const file{path};
  std::vector<float> out(6);
  auto const error_of_read = [&](char const* name, std::vector<std::uint64_t> const& shape) -> std::string {
    try {
      file.read(name, shape, out);
      return {};
    } catch (model_file_error const& problem) {
      return problem.what();
    }
  };
  check_says(error_of_read("c", {6}), {"tensor c", "missing", "2 tensors"});
  check_says(error_of_read("a", {3, 2}), {"tensor a", "[2, 3]", "[3, 2]"});
  check_says(error_of_read("b", {4}), {"tensor b", "F16", "F32"});
  out.resize(5);
  check_says(error_of_read("a", {2, 3}), {"tensor a", "24", "20"});
}

TEST_CASE("a model file that is not there is named")
{
  scratch_folder const folder;
  check_says(error_of(folder.path / "none.safetensors"), {"none.safetensors", "cannot be read"});
}

TEST_CASE("crc32 agrees with its published check value, at any length of the tail")
{
  auto const sum = [](std::string const& text) { return host_engine::crc32(std::as_bytes(std::span{text})); };
  CHECK(sum("123456789") == 0xCBF43926U);
  CHECK(sum("") == 0U);
  CHECK(sum("a") == 0xE8B7BE43U);
  CHECK(sum("The quick brown fox jumps over the lazy dog") == 0x414FA339U);
}

TEST_CASE("load_llama names the configuration's fault")
{
  scratch_folder const folder;
  nlohmann::json config{{"num_hidden_layers", 1},     {"hidden_size", 8},       {"num_attention_heads", 4},
                        {"num_key_value_heads", 2},   {"intermediate_size", 8}, {"vocab_size", 5},
                        {"rope_theta", 1e4},          {"rms_norm_eps", 1e-5},   {"max_position_embeddings", 8},
                        {"tie_word_embeddings", true}};
  auto const error_of_config = [&](std::string const& text) -> std::string {
    write_bytes(folder.path / "config.json", text);
    try {
      (void)host_engine::load_llama(folder.path);
      return {};
    } catch (model_file_error const& problem) {
      return problem.what();
    }
  };
  SUBCASE("not there") { CHECK_THROWS_AS((void)host_engine::load_llama(folder.path / "none"), model_file_error); }
  SUBCASE("no JSON") { check_says(error_of_config("{"), {"config.json", "corrupt"}); }
  SUBCASE("a field is missing")
  {
    config.erase("vocab_size");
    check_says(error_of_config(config.dump()), {"config.json", "vocab_size"});
  }
  SUBCASE("heads that can't be grouped")
  {
    config["num_key_value_heads"] = 3;
    check_says(error_of_config(config.dump()), {"query heads 4", "KV heads 3"});
  }
  SUBCASE("an output matrix of its own")
  {
    config["tie_word_embeddings"] = false;
    check_says(error_of_config(config.dump()), {"tie_word_embeddings"});
  }
  SUBCASE("right, but without weights")
  {
    check_says(error_of_config(config.dump()), {"model.safetensors", "cannot be read"});
  }
}

TEST_SUITE_END();
