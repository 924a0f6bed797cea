#pragma once

/// Which heads choose in each layer of a model and which layers are to stay dense, as measured on a text, and its text form.

#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/selector/head_choice.hpp>
#include <pulseinfer/types.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <istream>
#include <iterator>
#include <limits>
#include <ostream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace pulseinfer {

/// Of one layer. Coverage is the part of all heads' mass that a choice of blocks recovers, of what the best choice recovers;
/// blocks that are always selected are left out of both.
struct calibrated_layer {
  layer_kind kind = layer_kind::selected;  ///< selected; or dense where selection costs far more than elsewhere
  double divergence = 0.0;  ///< nat a token: KL of the dense model from the one in which this layer alone selects
  head_choice heads = {};
  double coverage = 0.0;       ///< by these heads' digests
  double vote_coverage = 0.0;  ///< by the vote of all heads' digests

  friend bool operator==(calibrated_layer const&, calibrated_layer const&) = default;
};

/// What was measured, and of which model and selection.
struct calibration {
  std::uint32_t query_heads = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t block_tokens = 0;
  std::uint32_t budget_tokens = 0;
  std::string digest = {};  ///< the digest form's name
  std::vector<calibrated_layer> layers = {};

  friend bool operator==(calibration const&, calibration const&) = default;
};

/// Whether a calibration is one of this model's cache.
/// @throws configuration_error with the numbers that differ
inline void validate(calibration const& measured, kv_geometry const& geometry)
{
  auto const same = [](std::uint64_t calibrated, std::uint64_t here, char const* name) {
    if (calibrated != here) {
      throw configuration_error{
        "calibrated for " + std::to_string(calibrated) + ' ' + name + ", the cache has " + std::to_string(here)};
    }
  };
  same(measured.layers.size(), geometry.layers, "layers");
  same(measured.query_heads, geometry.query_heads, "query heads");
  same(measured.kv_heads, geometry.kv_heads, "KV heads");
  same(measured.head_dim, geometry.head_dim, "elements of a head");
  same(measured.block_tokens, geometry.block_tokens, "tokens of a block");
  for (std::size_t layer = 0; layer < measured.layers.size(); ++layer) {
    validate(measured.layers[layer].heads, static_cast<layer_id>(layer), geometry);
  }
}

/// Layers that look things up: those whose divergence is more than `times` the median of all layers', a sixth of all layers at
/// most, the costliest. What selection costs a model lies in few layers; coverage does not tell which.
/// @param divergence [layers]   @return ascending
/// @source measured: docs/accuracy.md, "Which layers"
[[nodiscard]] inline std::vector<std::uint32_t> lookup_layers(
  std::vector<double> const& divergence, double times = 10.0)
{
  std::vector<std::uint32_t> result;
  if (divergence.empty()) { return result; }
  std::vector<double> sorted = divergence;
  std::sort(sorted.begin(), sorted.end());
  double const least = times * sorted[sorted.size() / 2];
  for (std::size_t layer = 0; layer < divergence.size(); ++layer) {
    if (divergence[layer] > least) { result.push_back(static_cast<std::uint32_t>(layer)); }
  }
  std::stable_sort(
    result.begin(), result.end(), [&](std::uint32_t a, std::uint32_t b) { return divergence[a] > divergence[b]; });
  result.resize(std::min(result.size(), (divergence.size() + 5) / 6));
  std::sort(result.begin(), result.end());
  return result;
}

/// The layers that a calibration wants dense, ascending.
[[nodiscard]] inline std::vector<std::uint32_t> dense_layers(calibration const& measured)
{
  std::vector<std::uint32_t> result;
  for (std::size_t layer = 0; layer < measured.layers.size(); ++layer) {
    if (measured.layers[layer].kind == layer_kind::dense) { result.push_back(static_cast<std::uint32_t>(layer)); }
  }
  return result;
}

/// A calibration's layers as those of a cache: kv_geometry::layer_groups.
[[nodiscard]] inline std::vector<layer_group> layer_groups(calibration const& measured)
{
  std::vector<layer_group> result;
  for (std::size_t layer = 0; layer < measured.layers.size(); ++layer) {
    layer_kind const kind = measured.layers[layer].kind;
    if (result.empty() || result.back().kind != kind) {
      result.push_back({.first = static_cast<std::uint32_t>(layer), .kind = kind});
    }
    ++result.back().count;
  }
  return result;
}

inline constexpr std::string_view calibration_header = "pulseinfer calibration 2";

namespace detail {

/// The shortest text that reads back as the same number.
template <class T>
[[nodiscard]] std::string calibration_number(T value)
{
  char text[64];
  return {text, std::to_chars(std::begin(text), std::end(text), value).ptr};
}

}  // namespace detail

/// Lines of words with one space between them: the header; `model` and `selection` with numbers; one `layer` each with what was
/// measured, whether the layer selects or is dense, the heads and, where they differ from 1, the weights; `end` and the number of
/// layers.
inline void write_calibration(std::ostream& out, calibration const& measured)
{
  auto const number = [](auto value) { return detail::calibration_number(value); };
  out << calibration_header << "\nmodel layers " << number(measured.layers.size()) << " query_heads "
      << number(measured.query_heads) << " kv_heads " << number(measured.kv_heads) << " head_dim "
      << number(measured.head_dim) << "\nselection digest " << measured.digest << " block_tokens "
      << number(measured.block_tokens) << " budget_tokens " << number(measured.budget_tokens) << '\n';
  for (std::size_t i = 0; i < measured.layers.size(); ++i) {
    calibrated_layer const& layer = measured.layers[i];
    out << "layer " << number(i) << (layer.kind == layer_kind::dense ? " dense" : " selected") << " divergence "
        << number(layer.divergence) << " coverage " << number(layer.coverage) << " of_vote "
        << number(layer.vote_coverage)
        << (layer.heads.combination == share_combination::sum ? " sum heads" : " largest heads");
    for (std::uint32_t const head : layer.heads.kv_heads) { out << ' ' << number(head); }
    if (!layer.heads.weights.empty()) {
      out << " weights";
      for (float const weight : layer.heads.weights) { out << ' ' << number(weight); }
    }
    out << '\n';
  }
  out << "end " << number(measured.layers.size()) << '\n';
}

namespace detail {

/// Reads the words of one line after another, and refuses with the line's number.
class calibration_reader {
 public:
  explicit calibration_reader(std::istream& in) : in_{&in} {}

  void next_line(char const* wanted)
  {
    if (!more_lines()) {
      refuse(in_->eof() ? std::string{"the file ends where '"} + wanted + "' is to stand" : "the file cannot be read");
    }
    at_ = 0;
  }
  [[nodiscard]] bool more_lines()
  {
    ++number_;
    if (!std::getline(*in_, line_)) { return false; }
    for (std::size_t i = 0; i < line_.size(); ++i) {
      // Anything else would stand in a digest's name, or cut the text of a refusal.
      if (line_[i] < ' ' || line_[i] > '~') {
        refuse(
          "character " + std::to_string(i + 1) + " has the code " +
          std::to_string(static_cast<unsigned char>(line_[i])) +
          ", where printable ASCII and lines that end with a line feed alone are wanted");
      }
    }
    return true;
  }

  [[nodiscard]] std::string_view line() const { return line_; }
  [[nodiscard]] bool more_words() const { return at_ <= line_.size() && !line_.empty(); }

  [[nodiscard]] std::string_view word(char const* wanted)
  {
    if (!more_words()) { refuse(std::string{"the line ends where "} + wanted + " is to stand"); }
    std::size_t const end = std::min(line_.find(' ', at_), line_.size());
    std::string_view const result = std::string_view{line_}.substr(at_, end - at_);
    if (result.empty()) { refuse("words with one space between them are wanted"); }
    at_ = end + 1;
    return result;
  }
  void expect(std::string_view name)
  {
    if (std::string_view const found = word(name.data()); found != name) {
      refuse("'" + std::string{found.substr(0, 40)} + "' where '" + std::string{name} + "' is to stand");
    }
  }
  template <class T>
  [[nodiscard]] T value(char const* name, T most)
  {
    std::string_view const text = word(name);
    T result{};
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), result);
    if (error != std::errc{} || end != text.data() + text.size() || text.starts_with('-') || !(result <= most)) {
      refuse("'" + std::string{text.substr(0, 40)} + "' is no " + name + " from 0 to " + calibration_number(most));
    }
    return result;
  }
  void expect_end()
  {
    if (more_words()) { refuse("'" + line_.substr(at_, 40) + "' is too much"); }
  }
  [[noreturn]] void refuse(std::string const& what) const
  {
    throw argument_error{status::invalid_argument, "calibration, line " + std::to_string(number_) + ": " + what};
  }

 private:
  std::istream* in_;
  std::string line_;
  std::size_t number_ = 0;
  std::size_t at_ = 0;
};

}  // namespace detail

/// Reads what write_calibration writes, and nothing else.
/// @throws argument_error naming the line and what is wrong with it: another version, a file cut short or unreadable, numbers
/// that are none, characters that are no printable ASCII
[[nodiscard]] inline calibration read_calibration(std::istream& in)
{
  constexpr std::uint32_t most = 1U << 24U;
  detail::calibration_reader lines{in};
  auto const named = [&](std::string_view name, std::uint32_t largest) {
    lines.expect(name);
    return lines.value<std::uint32_t>(name.data(), largest);
  };
  calibration result;
  lines.next_line(calibration_header.data());
  if (lines.line() != calibration_header) {
    lines.refuse(
      "'" + std::string{lines.line().substr(0, 40)} + "' where '" + std::string{calibration_header} +
      "' begins the file");
  }
  lines.next_line("model");
  lines.expect("model");
  std::uint32_t const layers = named("layers", 1U << 16U);
  result.query_heads = named("query_heads", most);
  result.kv_heads = named("kv_heads", most);
  result.head_dim = named("head_dim", most);
  lines.expect_end();
  lines.next_line("selection");
  lines.expect("selection");
  lines.expect("digest");
  result.digest = lines.word("a digest's name");
  if (result.digest.size() > 64) {
    lines.refuse("a digest's name of " + std::to_string(result.digest.size()) + " characters, where 64 are the most");
  }
  result.block_tokens = named("block_tokens", most);
  result.budget_tokens = named("budget_tokens", most);
  lines.expect_end();
  for (std::uint32_t i = 0; i < layers; ++i) {
    lines.next_line("layer");
    calibrated_layer& layer = result.layers.emplace_back();
    if (named("layer", most) != i) { lines.refuse("layer " + std::to_string(i) + " comes next"); }
    std::string_view const kind = lines.word("selected or dense");
    if (kind != "selected" && kind != "dense") {
      lines.refuse("'" + std::string{kind.substr(0, 40)} + "' where selected or dense is to stand");
    }
    layer.kind = kind == "dense" ? layer_kind::dense : layer_kind::selected;
    lines.expect("divergence");
    layer.divergence = lines.value<double>("divergence", std::numeric_limits<double>::max());
    lines.expect("coverage");
    layer.coverage = lines.value<double>("coverage", 1.0);
    lines.expect("of_vote");
    layer.vote_coverage = lines.value<double>("coverage", 1.0);
    std::string_view const combination = lines.word("sum or largest");
    if (combination != "sum" && combination != "largest") {
      lines.refuse("'" + std::string{combination.substr(0, 40)} + "' where sum or largest is to stand");
    }
    layer.heads.combination = combination == "sum" ? share_combination::sum : share_combination::largest;
    lines.expect("heads");
    bool weighted = false;
    while (lines.more_words() && !weighted) {
      std::string_view const text = lines.word("a head");
      if (text == "weights") {
        weighted = true;
        break;
      }
      std::uint32_t head = 0;
      auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), head);
      bool const ascends = layer.heads.kv_heads.empty() || head > layer.heads.kv_heads.back();
      if (error != std::errc{} || end != text.data() + text.size() || head >= result.kv_heads || !ascends) {
        lines.refuse(
          "'" + std::string{text.substr(0, 40)} + "' is no head of " + std::to_string(result.kv_heads) +
          " behind those before it");
      }
      layer.heads.kv_heads.push_back(head);
    }
    if (layer.heads.kv_heads.empty()) { lines.refuse("no head chooses"); }
    for (std::size_t w = 0; weighted && w < layer.heads.kv_heads.size(); ++w) {
      layer.heads.weights.push_back(lines.value<float>("weight", std::numeric_limits<float>::max()));
    }
    lines.expect_end();
  }
  lines.next_line("end");
  if (named("end", most) != layers) { lines.refuse("the file names " + std::to_string(layers) + " layers"); }
  lines.expect_end();
  if (lines.more_lines()) { lines.refuse("nothing is to follow the end"); }
  return result;
}

}  // namespace pulseinfer
