#include "command_line.hpp"

namespace decode_text {

std::optional<int> read_command_line(CLI::App& app, int argc, char const* const* argv)
{
  app.footer("Exit code: 0 done; 1 it could not be done, standard error says why; 2 the command line is wrong");
  try {
    app.parse(argc, argv);
  } catch (CLI::ParseError const& problem) {
    // It prints the help or the error; its own code says which kind of error, in numbers above 100.
    return app.exit(problem) == 0 ? 0 : exit_usage;
  }
  return std::nullopt;
}

}  // namespace decode_text
