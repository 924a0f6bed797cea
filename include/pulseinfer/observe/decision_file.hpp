#pragma once

/// Decision logs as text, one decision a line: `run LAYER WAIT ROW...`, `end`, `admit SAID`, `keep KEEPS`,
/// `balance DEMOTED PROMOTED [SLOTS...]` (-1: no row; slots by layer where leases are to have others).

#include <pulseinfer/error.hpp>
#include <pulseinfer/view/decision_record.hpp>

#include <algorithm>
#include <istream>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

namespace pulseinfer {

inline constexpr char const* decision_file_header = "pulseinfer decisions 1";

inline void write_decisions(std::ostream& out, decision_log const& log)
{
  out << decision_file_header << '\n';
  for (decision_entry const& entry : log.entries()) {
    switch (entry.kind) {
      case record_kind::run:
        out << "run " << to_number(entry.layer) << ' ' << (entry.enqueue_wait ? 1 : 0);
        for (row_id const row : log.rows_of(entry)) { out << ' ' << to_number(row); }
        out << '\n';
        break;
      case record_kind::end_step: out << "end\n"; break;
      case record_kind::admit: out << "admit " << name_of(entry.said) << '\n'; break;
      case record_kind::keep: out << "keep " << (entry.keeps ? 1 : 0) << '\n'; break;
      case record_kind::balance:
        out << "balance " << to_number(entry.demote) << ' ' << to_number(entry.promote);
        for (std::uint32_t const slots : log.slots_of(entry)) { out << ' ' << slots; }
        out << '\n';
        break;
    }
  }
}

/// @throws argument_error naming the line and what is wrong with it
[[nodiscard]] inline decision_log read_decisions(std::istream& in)
{
  struct line_entry {
    decision_entry entry;
    std::vector<row_id> rows;
    std::vector<std::uint32_t> slots;
  };
  std::vector<line_entry> lines;
  std::string line;
  std::size_t number = 1;
  auto const refuse = [&](std::string const& what) {
    throw argument_error{status::invalid_argument, "decision file, line " + std::to_string(number) + ": " + what};
  };
  if (!std::getline(in, line) || line != decision_file_header) {
    refuse("'" + line.substr(0, 40) + "' where '" + decision_file_header + "' begins the file");
  }
  std::size_t rows = 0, slots = 0;
  while (std::getline(in, line)) {
    ++number;
    std::istringstream words{line};
    std::string word;
    words >> word;
    line_entry read;
    if (word == "run") {
      int layer = 0;
      int wait = 0;
      if (!(words >> layer >> wait) || layer < 0 || wait < 0 || wait > 1) {
        refuse("'" + line.substr(0, 40) + "' names no layer and wait");
      }
      read.entry.layer = static_cast<layer_id>(layer);
      read.entry.enqueue_wait = wait == 1;
      for (int row = 0; words >> row;) {
        if (row < 0) { refuse("row " + std::to_string(row)); }
        read.rows.push_back(static_cast<row_id>(row));
      }
      if (!words.eof()) { refuse("'" + line.substr(0, 40) + "' has a row that is no number"); }
      if (read.rows.empty()) { refuse("a run of no rows"); }
    } else if (word == "end") {
      read.entry.kind = record_kind::end_step;
    } else if (word == "admit") {
      read.entry.kind = record_kind::admit;
      std::string said;
      words >> said;
      bool known = false;
      for (admission const a : {admission::admitted, admission::queued, admission::rejected}) {
        if (said == name_of(a)) {
          read.entry.said = a;
          known = true;
        }
      }
      if (!known) { refuse("'" + said.substr(0, 40) + "' is no admission"); }
    } else if (word == "keep") {
      read.entry.kind = record_kind::keep;
      int keeps = 0;
      if (!(words >> keeps) || keeps < 0 || keeps > 1) { refuse("'" + line.substr(0, 40) + "' says neither 0 nor 1"); }
      read.entry.keeps = keeps == 1;
    } else if (word == "balance") {
      read.entry.kind = record_kind::balance;
      int demote = 0, promote = 0;
      if (!(words >> demote >> promote) || demote < -1 || promote < -1) {
        refuse("'" + line.substr(0, 40) + "' names no two rows, or -1");
      }
      read.entry.demote = static_cast<row_id>(demote);
      read.entry.promote = static_cast<row_id>(promote);
      for (std::uint32_t count = 0; words >> count;) { read.slots.push_back(count); }
      if (!words.eof()) { refuse("'" + line.substr(0, 40) + "' has slots that are no number"); }
      read.entry.spread = !read.slots.empty();
    } else {
      refuse("'" + word.substr(0, 40) + "' is no decision");
    }
    rows += read.rows.size();
    slots += read.slots.size();
    lines.push_back(std::move(read));
  }
  decision_log log{std::max<std::size_t>(lines.size(), 1), std::max<std::size_t>(rows, 1), slots};
  for (line_entry const& read : lines) {
    if (read.entry.spread) {
      log.add_spread(read.entry, read.slots);
    } else {
      log.add(read.entry, read.rows);
    }
  }
  return log;
}

}  // namespace pulseinfer
