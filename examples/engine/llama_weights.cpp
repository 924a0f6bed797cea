#include "llama_weights.hpp"

#include "portable_random.hpp"
#include "safetensors.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <span>

namespace host_engine {
namespace {

llama_geometry read_geometry(std::filesystem::path const& path)
{
  std::ifstream stream{path};
  if (!stream) throw model_file_error{path.string() + ": cannot be opened"};
  llama_geometry geometry;
  try {
    nlohmann::json const config = nlohmann::json::parse(stream);
    geometry.layers = config.at("num_hidden_layers").get<std::uint32_t>();
    geometry.hidden = config.at("hidden_size").get<std::uint32_t>();
    geometry.query_heads = config.at("num_attention_heads").get<std::uint32_t>();
    geometry.kv_heads = config.value("num_key_value_heads", geometry.query_heads);
    geometry.head_dim = config.value("head_dim", geometry.hidden / std::max(geometry.query_heads, 1U));
    geometry.feed_forward = config.at("intermediate_size").get<std::uint32_t>();
    geometry.vocabulary = config.at("vocab_size").get<std::uint32_t>();
    geometry.context_tokens = config.at("max_position_embeddings").get<std::uint32_t>();
    geometry.rope_theta = config.at("rope_theta").get<float>();
    geometry.norm_epsilon = config.at("rms_norm_eps").get<float>();
    if (!config.value("tie_word_embeddings", false)) {
      throw model_file_error{path.string() + ": tie_word_embeddings is not true, and this engine has no output matrix"};
    }
  } catch (nlohmann::json::exception const& problem) {
    throw model_file_error{path.string() + ": is corrupt or no model configuration: " + problem.what()};
  }
  geometry.check();
  return geometry;
}

}  // namespace

void llama_geometry::check() const
{
  auto const numbers = " (layers " + std::to_string(layers) + ", hidden " + std::to_string(hidden) + ", query heads " +
    std::to_string(query_heads) + ", KV heads " + std::to_string(kv_heads) + ", head_dim " + std::to_string(head_dim) +
    ", feed_forward " + std::to_string(feed_forward) + ", vocabulary " + std::to_string(vocabulary) + ")";
  if (
    layers == 0 || hidden == 0 || query_heads == 0 || kv_heads == 0 || head_dim == 0 || feed_forward == 0 ||
    vocabulary == 0 || context_tokens == 0) {
    throw model_file_error{"a model's sizes must not be 0" + numbers};
  }
  if (query_heads % kv_heads != 0) throw model_file_error{"KV heads must divide the query heads" + numbers};
  if (head_dim % 2 != 0) throw model_file_error{"head_dim must be even for rotary positions" + numbers};
}

llama_weights load_llama(std::filesystem::path const& folder)
{
  llama_weights weights;
  weights.name = folder.filename().string();
  weights.geometry = read_geometry(folder / "config.json");
  llama_geometry const& geometry = weights.geometry;
  safetensors_file const file{folder / "model.safetensors"};

  std::uint64_t const hidden = geometry.hidden, query_width = geometry.query_width(), kv_width = geometry.kv_width(),
                      feed_forward = geometry.feed_forward;
  auto const vector = [&](std::string const& name, std::vector<float>& out) {
    out.resize(hidden);
    file.read(name, std::array{hidden}, out);
  };
  // Reads matrices [rows, columns] below each other.
  struct part {
    std::string name;
    std::uint64_t rows;
  };
  auto const stack = [&](std::initializer_list<part> parts, std::uint64_t columns, std::vector<float>& out) {
    std::uint64_t rows = 0;
    for (part const& matrix : parts) rows += matrix.rows;
    out.resize(rows * columns);
    std::span<float> rest{out};
    for (part const& matrix : parts) {
      file.read(matrix.name, std::array{matrix.rows, columns}, rest.first(matrix.rows * columns));
      rest = rest.subspan(matrix.rows * columns);
    }
  };

  stack({{"model.embed_tokens.weight", geometry.vocabulary}}, hidden, weights.embedding);
  vector("model.norm.weight", weights.final_norm);
  weights.layers.resize(geometry.layers);
  for (std::uint32_t index = 0; index < geometry.layers; ++index) {
    llama_weights::layer& layer = weights.layers[index];
    std::string const prefix = "model.layers." + std::to_string(index) + ".";
    vector(prefix + "input_layernorm.weight", layer.attention_norm);
    stack(
      {{prefix + "self_attn.q_proj.weight", query_width},
       {prefix + "self_attn.k_proj.weight", kv_width},
       {prefix + "self_attn.v_proj.weight", kv_width}},
      hidden, layer.qkv);
    stack({{prefix + "self_attn.o_proj.weight", hidden}}, query_width, layer.output);
    vector(prefix + "post_attention_layernorm.weight", layer.mlp_norm);
    stack(
      {{prefix + "mlp.gate_proj.weight", feed_forward}, {prefix + "mlp.up_proj.weight", feed_forward}}, hidden,
      layer.gate_up);
    stack({{prefix + "mlp.down_proj.weight", hidden}}, feed_forward, layer.down);
  }
  return weights;
}

llama_weights make_random_llama(llama_geometry const& geometry, std::uint64_t seed)
{
  geometry.check();
  llama_weights weights;
  weights.name = "random";
  weights.geometry = geometry;
  portable_random random{seed};
  std::size_t const hidden = geometry.hidden, query_width = geometry.query_width(), kv_width = geometry.kv_width(),
                    feed_forward = geometry.feed_forward;
  // Deviation 1/sqrt(inputs) keeps activations near unit size; norms are spread around 1, so that a forgotten one shows.
  auto const matrix = [&](std::size_t rows, std::size_t columns) {
    std::vector<float> values(rows * columns);
    for (float& value : values) value = random.spread(1.0F / std::sqrt(static_cast<float>(columns)));
    return values;
  };
  auto const norm = [&] {
    std::vector<float> values(hidden);
    for (float& value : values) value = 1.0F + random.spread(0.2F);
    return values;
  };

  weights.embedding.resize(geometry.vocabulary * hidden);
  for (float& value : weights.embedding) value = random.spread(0.5F);
  for (std::uint32_t index = 0; index < geometry.layers; ++index) {
    weights.layers.push_back(
      {.attention_norm = norm(),
       .qkv = matrix(query_width + 2 * kv_width, hidden),
       .output = matrix(hidden, query_width),
       .mlp_norm = norm(),
       .gate_up = matrix(2 * feed_forward, hidden),
       .down = matrix(hidden, feed_forward)});
  }
  weights.final_norm = norm();
  return weights;
}

}  // namespace host_engine
