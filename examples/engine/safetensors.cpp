#include "safetensors.hpp"

#include "crc32.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <bit>
#include <charconv>
#include <fstream>
#include <utility>

namespace host_engine {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian, and so is this reader");

// A header describes tensors, a few hundred bytes each; a length beyond this is damage and not a model.
constexpr std::uint64_t max_header_bytes = 100'000'000;

std::uint64_t dtype_bytes(std::string const& dtype)
{
  static std::map<std::string, std::uint64_t> const sizes{{"F64", 8},  {"I64", 8}, {"F32", 4}, {"I32", 4}, {"F16", 2},
                                                          {"BF16", 2}, {"I16", 2}, {"I8", 1},  {"U8", 1},  {"BOOL", 1}};
  auto const found = sizes.find(dtype);
  return found == sizes.end() ? 0 : found->second;
}

// Product of the dimensions times `start`, nothing if it does not fit 64 bits.
std::optional<std::uint64_t> product(std::uint64_t start, std::span<std::uint64_t const> shape)
{
  std::uint64_t result = start;
  for (std::uint64_t const dimension : shape) {
    if (__builtin_mul_overflow(result, dimension, &result)) return std::nullopt;
  }
  return result;
}

std::string hex(std::uint32_t value)
{
  char text[9]{};
  std::to_chars(std::begin(text), std::end(text), value, 16);
  return text;
}

}  // namespace

std::string shape_text(std::span<std::uint64_t const> shape)
{
  std::string text = "[";
  for (std::uint64_t const dimension : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(dimension);
  return text + "]";
}

safetensors_file::safetensors_file(std::filesystem::path path) : path_{std::move(path)}
{
  auto const fail = [&](std::string const& what) { throw model_file_error{path_.string() + ": " + what}; };

  std::error_code error;
  std::uint64_t const file_bytes = std::filesystem::file_size(path_, error);
  if (error) fail("cannot be read (" + error.message() + ")");
  std::ifstream stream{path_, std::ios::binary};
  if (!stream) fail("cannot be opened");
  if (file_bytes < 8)
    fail("truncated: a header length of 8 bytes is expected, the file has " + std::to_string(file_bytes));

  std::uint64_t header_bytes = 0;
  stream.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes);
  if (header_bytes > max_header_bytes || header_bytes > file_bytes - 8) {
    fail(
      "truncated or corrupt: the header is said to have " + std::to_string(header_bytes) + " bytes, the file has " +
      std::to_string(file_bytes - 8) + " after the length");
  }
  std::string text(header_bytes, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(header_bytes));
  if (!stream) fail("cannot read the header of " + std::to_string(header_bytes) + " bytes");

  std::uint64_t const data_bytes = file_bytes - 8 - header_bytes;
  std::uint64_t expected_bytes = 0;
  try {
    nlohmann::json const header = nlohmann::json::parse(text);
    nlohmann::json const metadata = header.value("__metadata__", nlohmann::json::object());
    for (auto const& [name, entry] : header.items()) {
      if (name == "__metadata__") continue;
      tensor described{};
      described.dtype = entry.at("dtype").get<std::string>();
      described.shape = entry.at("shape").get<std::vector<std::uint64_t>>();
      auto const [begin, end] = entry.at("data_offsets").get<std::pair<std::uint64_t, std::uint64_t>>();
      std::uint64_t const element_bytes = dtype_bytes(described.dtype);
      if (element_bytes == 0) fail("tensor " + name + " has the unknown type " + described.dtype);
      auto const bytes = product(element_bytes, described.shape);
      if (!bytes || end < begin || end - begin != *bytes) {
        fail(
          "tensor " + name + " of type " + described.dtype + " and shape " + shape_text(described.shape) + " needs " +
          (bytes ? std::to_string(*bytes) : std::string{"more than 2^64"}) + " bytes, its place is " +
          std::to_string(begin) + " to " + std::to_string(end));
      }
      described.first_byte = 8 + header_bytes + begin;
      described.bytes = *bytes;
      expected_bytes = std::max(expected_bytes, end);
      if (auto const checksum = metadata.find("crc32." + name); checksum != metadata.end()) {
        described.crc32 = static_cast<std::uint32_t>(std::stoul(checksum->get<std::string>(), nullptr, 16));
      }
      tensors_.emplace(name, std::move(described));
    }
  } catch (nlohmann::json::exception const& problem) {
    fail("the header of " + std::to_string(header_bytes) + " bytes is corrupt: " + problem.what());
  } catch (std::logic_error const& problem) {
    fail(
      "the header of " + std::to_string(header_bytes) + " bytes has a checksum that is no number: " + problem.what());
  }
  if (data_bytes != expected_bytes) {
    fail(
      std::string{data_bytes < expected_bytes ? "truncated" : "corrupt"} + ": the header describes " +
      std::to_string(expected_bytes) + " bytes of data, the file has " + std::to_string(data_bytes));
  }
}

void safetensors_file::read(std::string const& name, std::span<std::uint64_t const> shape, std::span<float> out) const
{
  auto const fail = [&](std::string const& what) {
    throw model_file_error{path_.string() + ": tensor " + name + " " + what};
  };
  auto const found = tensors_.find(name);
  if (found == tensors_.end()) fail("is missing (the file has " + std::to_string(tensors_.size()) + " tensors)");
  tensor const& described = found->second;
  if (described.dtype != "F32") fail("has type " + described.dtype + ", expected F32");
  if (!std::ranges::equal(described.shape, shape)) {
    fail("has shape " + shape_text(described.shape) + ", expected " + shape_text(shape));
  }
  if (out.size_bytes() != described.bytes) {
    fail("has " + std::to_string(described.bytes) + " bytes, its destination " + std::to_string(out.size_bytes()));
  }

  std::ifstream stream{path_, std::ios::binary};
  stream.seekg(static_cast<std::streamoff>(described.first_byte));
  stream.read(reinterpret_cast<char*>(out.data()), static_cast<std::streamsize>(described.bytes));
  if (!stream) {
    fail(
      "ends early: " + std::to_string(described.bytes) + " bytes expected from byte " +
      std::to_string(described.first_byte) + " on, " + std::to_string(stream.gcount()) + " found");
  }
  if (described.crc32) {
    std::uint32_t const sum = crc32(std::as_bytes(out));
    if (sum != *described.crc32) {
      fail(
        "is corrupt: CRC-32 of its " + std::to_string(described.bytes) + " bytes is " + hex(sum) + ", expected " +
        hex(*described.crc32));
    }
  }
}

}  // namespace host_engine
