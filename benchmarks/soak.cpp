/// Sequences under random use, for as long as is asked: one operation after another on several small managers that live all
/// the while. Fails where a byte is foreign, a block is lost, an audit complains or memory grows.

#include <support/manager/sequence_machine.hpp>

#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <unistd.h>
#include <vector>

namespace {

using namespace pulseinfer_test;

struct choices {
  std::uint64_t operations = 1'000'000;
  std::uint64_t seed = 1;
};

[[noreturn]] void usage(int code)
{
  std::fprintf(
    code == 0 ? stdout : stderr,
    "usage: soak [--operations N] [--seed N]\n"
    "  runs N random operations (1000000) on sequences of small managers over the CPU backend\n");
  std::exit(code);
}

choices parse(int count, char** words)
{
  choices made;
  for (int i = 1; i < count; ++i) {
    std::string_view const word = words[i];
    if (word == "--help") { usage(0); }
    std::uint64_t* const number = word == "--operations" ? &made.operations : word == "--seed" ? &made.seed : nullptr;
    if (number == nullptr || i + 1 == count) { usage(2); }
    char* end = nullptr;
    *number = std::strtoull(words[++i], &end, 10);
    if (end == words[i] || *end != 0) { usage(2); }
  }
  if (made.operations == 0) { usage(2); }
  return made;
}

/// Resident memory of this process in KiB; 0 where the system does not say.
std::uint64_t resident_kib()
{
  std::ifstream file{"/proc/self/statm"};
  std::uint64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)) / 1024;
}

/// A machine, whatever its manager.
class runner {
 public:
  virtual ~runner() = default;
  virtual bool run(std::uint64_t number) = 0;
  virtual bool finish() = 0;
  [[nodiscard]] virtual std::string const& fault() const = 0;
  [[nodiscard]] virtual std::uint64_t well(machine_action action) const = 0;
  [[nodiscard]] virtual std::uint64_t recalled_blocks() const = 0;
};

template <class Manager>
class runner_of final : public runner {
 public:
  explicit runner_of(machine_setting const& setting) : machine_{setting} {}

  bool run(std::uint64_t number) override { return machine_.run(number); }
  bool finish() override { return machine_.finish(); }
  [[nodiscard]] std::string const& fault() const override { return machine_.fault(); }
  [[nodiscard]] std::uint64_t well(machine_action action) const override { return machine_.went_well(action); }
  [[nodiscard]] std::uint64_t recalled_blocks() const override { return machine_.recalled_blocks(); }

 private:
  sequence_machine<Manager> machine_;
};

struct named_runner {
  std::string name;
  std::unique_ptr<runner> machine;
  std::uint64_t operations = 0;
};

template <class Manager>
void add(std::vector<named_runner>& runners, char const* name, machine_setting setting, std::uint64_t seed)
{
  setting.seed = seed + runners.size();
  runners.push_back({std::string{name} + ": " + name_of(setting), std::make_unique<runner_of<Manager>>(setting)});
}

std::vector<named_runner> make_runners(std::uint64_t seed)
{
  std::vector<named_runner> r;
  add<hits_manager>(
    r, "hits first", {.step_tokens = 3, .depth = 1, .slots = 170, .low_slots = 60, .warm_up = true}, seed);
  add<chosen_manager>(
    r, "chosen blocks", {.step_tokens = 2, .host_blocks = 60, .saved = 6, .slots = 140, .stream_blocks = 2}, seed);
  add<checked_manager>(r, "checked", {.block_tokens = 3, .head_groups = 2, .step_tokens = 5, .depth = 0}, seed);
  add<fragment_manager>(r, "planned on the host", {.block_tokens = 2, .recalls = 6, .warm_up = true}, seed);
  add<chosen_manager>(r, "mixed layers", {.step_tokens = 4, .depth = 1, .mixed_layers = true}, seed);
  add<checked_manager>(
    r, "checked, mixed layers", {.block_tokens = 1, .step_tokens = 3, .host_blocks = 50, .mixed_layers = true}, seed);
  add<hits_manager>(
    r, "prompts that stream", {.head_groups = 2, .step_tokens = 2, .stream_blocks = 1, .mixed_layers = true}, seed);
  return r;
}

int soak(choices const& made)
{
  constexpr std::uint64_t life = 5000;  // operations of a machine after which all its sequences end
  std::vector<named_runner> runners = make_runners(made.seed);
  std::mt19937_64 random{made.seed};
  std::uint64_t resident_at_tenth = 0;
  auto const fail = [](named_runner const& r, std::uint64_t operation) {
    std::printf("FAILED at operation %" PRIu64 " (%s)\n  %s\n", operation, r.name.c_str(), r.machine->fault().c_str());
    return 1;
  };
  auto const begin = std::chrono::steady_clock::now();
  for (std::uint64_t i = 0; i < made.operations; ++i) {
    named_runner& r = runners[i % runners.size()];
    if (!r.machine->run(random())) { return fail(r, i); }
    if (++r.operations % life == 0 && !r.machine->finish()) { return fail(r, i); }
    if (i + 1 == (made.operations + 9) / 10) { resident_at_tenth = resident_kib(); }
  }
  for (named_runner& r : runners) {
    if (!r.machine->finish()) { return fail(r, made.operations); }
  }
  double const seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::uint64_t const resident = resident_kib();

  std::printf("operations       %" PRIu64 ", seed %" PRIu64 "\n", made.operations, made.seed);
  std::printf("operations/s     %.0f\n", static_cast<double>(made.operations) / seconds);
  std::uint64_t recalled = 0;
  for (named_runner const& r : runners) { recalled += r.machine->recalled_blocks(); }
  std::printf("recalled blocks  %" PRIu64 "\n", recalled);
  std::printf("went well       ");
  for (std::uint32_t a = 0; a <= static_cast<std::uint32_t>(machine_action::promote); ++a) {
    auto const action = static_cast<machine_action>(a);
    std::uint64_t sum = 0;
    for (named_runner const& r : runners) { sum += r.machine->well(action); }
    std::printf(" %s %" PRIu64, name_of(action), sum);
  }
  std::printf("\naudit            nothing wrong after any operation, no byte foreign, nothing left at the end\n");
  std::printf("resident memory  %" PRIu64 " KiB at 10 %%, %" PRIu64 " KiB at the end\n", resident_at_tenth, resident);
  // An allocator rounds; a leak of one small object an operation is more than this.
  std::uint64_t const allowed = 512 + made.operations / 100;
  if (resident > resident_at_tenth + allowed && made.operations >= 100'000) {
    std::printf("FAILED: resident memory grew by %" PRIu64 " KiB\n", resident - resident_at_tenth);
    return 1;
  }
  return 0;
}

}  // namespace

int main(int count, char** words)
{
  choices const made = parse(count, words);
  try {
    return soak(made);
  } catch (std::exception const& reason) {
    std::fprintf(stderr, "error: %s\n", reason.what());
    return 1;
  }
}
