#include "decode_text/run_options.hpp"

#include <doctest/doctest.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace decode_text;

std::optional<run_options> parse(std::initializer_list<char const*> arguments, int& exit_code)
{
  std::vector<char const*> all{"decode_text"};
  all.insert(all.end(), arguments);
  exit_code = -1;
  return parse_options(static_cast<int>(all.size()), all.data(), exit_code);
}

run_options parsed(std::initializer_list<char const*> arguments)
{
  int exit_code = -1;
  std::optional<run_options> const options = parse(arguments, exit_code);
  REQUIRE(options.has_value());
  return *options;
}

int code_of(std::initializer_list<char const*> arguments)
{
  int exit_code = -1;
  REQUIRE_FALSE(parse(arguments, exit_code).has_value());
  return exit_code;
}

}  // namespace

TEST_SUITE_BEGIN("examples/decode_text");

TEST_CASE("help ends with 0, each kind of wrong command line with 2")
{
  CHECK(code_of({"--help"}) == 0);
  CHECK(code_of({"--no-such-option"}) == 2);
  CHECK(code_of({"extra"}) == 2);
  CHECK(code_of({"--budget"}) == 2);
  CHECK(code_of({"--budget", "many"}) == 2);
  CHECK(code_of({"--budget", "-1"}) == 2);
  CHECK(code_of({"--budget", "0"}) == 2);
  CHECK(code_of({"--budget", "32"}) == 2);  // 2 blocks: none is left beside sink, recent and open ones
  CHECK(code_of({"--budget", "512", "--sink", "512"}) == 2);
  CHECK(code_of({"--budget", "512", "--recent", "512"}) == 2);
  CHECK(code_of({"--budget", "512", "--block", "513"}) == 2);
  CHECK(code_of({"--hysteresis", "-0.5"}) == 2);
  CHECK(code_of({"--hysteresis", "81"}) == 2);
  CHECK(code_of({"--context", "1"}) == 2);
  CHECK(code_of({"--transfer", "carrier_pigeon"}) == 2);
  CHECK(code_of({"--device", "abacus"}) == 2);
  CHECK(code_of({"--note", "nothing"}) == 2);
  CHECK(code_of({"--note", "=nothing"}) == 2);
  CHECK(code_of({"--dense-layers", "7,x"}) == 2);
  CHECK(code_of({"--json", "figures", "--timeline", "./figures"}) == 2);
  CHECK(code_of({"--timeline", "figures", "--json", "figures"}) == 2);
}

TEST_CASE("each policy has its word, and the library's own way is the default")
{
  CHECK(parsed({}).offload.transfer == transfer_choice::gather_scatter);
  CHECK(parsed({"--transfer", "gather_scatter"}).offload.transfer == transfer_choice::gather_scatter);
  CHECK(parsed({"--transfer", "fragment_copy"}).offload.transfer == transfer_choice::fragment_copy);
  CHECK(parsed({"--transfer", "batch_copy"}).offload.transfer == transfer_choice::batch_copy);
  CHECK(parsed({}).offload.scheduler == scheduler_choice::interruptible);
  CHECK(parsed({"--scheduler", "lockstep"}).offload.scheduler == scheduler_choice::lockstep);
  CHECK(parsed({"--scheduler", "lockstep_hits_first"}).offload.scheduler == scheduler_choice::lockstep_hits_first);
  CHECK(parsed({}).offload.selector == selector_choice::soft_vote);
  CHECK(parsed({"--selector", "designated_head"}).offload.selector == selector_choice::designated_head);
  CHECK(parsed({"--head-rule", "max_share"}).offload.selector == selector_choice::max_share);
  CHECK(parsed({"--head-rule", "calibrated_heads"}).offload.selector == selector_choice::calibrated_heads);
  CHECK(code_of({"--head-rule", "dice"}) == 2);
}

TEST_CASE("digests of bytes for each quarter of a block are the default, and each other one has its word")
{
  using pulseinfer::dtype;
  CHECK(parsed({}).offload.digest == digest_choice::split_cuboid_mean);
  CHECK(parsed({}).offload.digest_type == dtype::int8);
  CHECK(offload_options{}.digest == digest_choice::split_cuboid_mean);  // what engines of this folder take
  CHECK(offload_options{}.digest_type == dtype::int8);
  for (auto const digest :
       {digest_choice::split_cuboid_mean, digest_choice::cuboid_mean, digest_choice::split_min_max,
        digest_choice::min_max, digest_choice::mean_key, digest_choice::log_mass}) {
    CHECK(parsed({"--digest", name_of(digest)}).offload.digest == digest);
  }
  for (auto const type : {dtype::int8, dtype::float16, dtype::float32}) {
    CHECK(parsed({"--digest-type", pulseinfer::name_of(type)}).offload.digest_type == type);
  }
  CHECK(code_of({"--digest", "tea_leaves"}) == 2);
  CHECK(code_of({"--digest-type", "bfloat16"}) == 2);
}

TEST_CASE("a calibration is a file, and which layers stay dense follows it unless they are named")
{
  CHECK_FALSE(parsed({}).calibration_path.has_value());
  CHECK_FALSE(parsed({}).dense_layers.has_value());
  CHECK(parsed({"--calibration", "mine.txt"}).calibration_path == "mine.txt");
  CHECK(parsed({"--dense-layers", "none"}).dense_layers == std::vector<std::uint32_t>{});
  CHECK(parsed({"--dense-layers", "3,9"}).dense_layers == std::vector<std::uint32_t>{3, 9});
}

TEST_CASE("figures and timeline are two files")
{
  run_options const options = parsed({"--json", "figures.json", "--timeline", "trace.json"});
  CHECK(options.json_path == "figures.json");
  CHECK(options.timeline_path == "trace.json");
}

TEST_CASE("it runs where there is a GPU on the GPU unless another device is named")
{
  CHECK(parsed({}).device == device_choice::automatic);
  CHECK(parsed({"--device", "auto"}).device == device_choice::automatic);
  CHECK(parsed({"--device", "cpu"}).device == device_choice::cpu);
  CHECK(parsed({"--device", "gpu"}).device == device_choice::gpu);
}

TEST_CASE("notes are entries of the file of figures, in their order, values with any signs")
{
  run_options const options = parsed({"--note", "commit=1a2b3c", "--note=command=scripts/demo --note=x=y"});
  REQUIRE(options.notes.size() == 2);
  CHECK(options.notes[0] == std::pair<std::string, std::string>{"commit", "1a2b3c"});
  CHECK(options.notes[1] == std::pair<std::string, std::string>{"command", "scripts/demo --note=x=y"});
}

TEST_CASE("slots follow the budget unless they are given")
{
  CHECK(parsed({"--budget", "512"}).offload.slots_tokens == 640);
  CHECK(parsed({"--budget", "512", "--slots", "1024"}).offload.slots_tokens == 1024);
}

TEST_SUITE_END();
