#include "curve_picture.hpp"

#include <algorithm>
#include <cmath>
#include <string>

namespace plan_capacity {

namespace {

constexpr double left = 70, right = 690, top = 40, bottom = 340;
constexpr char const* colours[] = {"#7f7f7f", "#1f77b4", "#ff7f0e", "#2ca02c"};

/// 1, 2 or 5 times a power of ten, so that about five of them fill `range`.
double tick_of(double range)
{
  double const power = std::pow(10.0, std::floor(std::log10(range / 5.0)));
  double const times = range / 5.0 / power;
  return power * (times < 1.5 ? 1.0 : times < 3.5 ? 2.0 : times < 7.5 ? 5.0 : 10.0);
}

}  // namespace

void draw_curves(std::ostream& out, setting const& s, std::span<capacity_plan const> plans, step_timeline const* step)
{
  double most_rows = 1.0, most_tokens = 1.0;
  for (capacity_plan const& plan : plans) {
    for (operating_point const& p : plan.curve) {
      most_rows = std::max(most_rows, 1.0 * p.rows);
      most_tokens = std::max(most_tokens, p.tokens_per_second);
    }
  }
  most_tokens *= 1.05;
  auto const x = [&](double rows) { return left + (right - left) * rows / most_rows; };
  auto const y = [&](double tokens) { return bottom - (bottom - top) * tokens / most_tokens; };
  out << R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 )" << (step == nullptr ? 400 : 540)
      << R"(" font-family="sans-serif" font-size="12">)" << '\n'
      << R"(<rect width="720" height="540" fill="white"/>)" << '\n'
      << R"(<text x="70" y="22" font-size="14">)" << s.model.name << " on " << s.gpu.name << ", " << s.prompt_tokens
      << " + " << s.output_tokens << " tokens</text>\n";
  for (double rows = 0.0; rows <= most_rows; rows += tick_of(most_rows)) {
    out << "<line x1=\"" << x(rows) << "\" y1=\"" << top << "\" x2=\"" << x(rows) << "\" y2=\"" << bottom
        << "\" stroke=\"#dddddd\"/><text x=\"" << x(rows) << "\" y=\"358\" text-anchor=\"middle\">" << rows
        << "</text>\n";
  }
  for (double tokens = 0.0; tokens <= most_tokens; tokens += tick_of(most_tokens)) {
    out << "<line x1=\"" << left << "\" y1=\"" << y(tokens) << "\" x2=\"" << right << "\" y2=\"" << y(tokens)
        << "\" stroke=\"#dddddd\"/><text x=\"64\" y=\"" << y(tokens) + 4 << "\" text-anchor=\"end\">" << tokens
        << "</text>\n";
  }
  out << R"(<text x="380" y="378" text-anchor="middle">requests at once</text>)"
      << "<text x=\"16\" y=\"190\" text-anchor=\"middle\" transform=\"rotate(-90 16 190)\">tokens/s</text>\n";
  for (std::size_t i = 0; i < plans.size(); ++i) {
    char const* const colour = colours[i % std::size(colours)];
    out << R"(<polyline fill="none" stroke-width="2" stroke=")" << colour << R"(" points=")";
    for (operating_point const& p : plans[i].curve) { out << x(p.rows) << ',' << y(p.tokens_per_second) << ' '; }
    out << "\"/>";
    if (plans[i].best.rows != 0) {
      out << "<circle r=\"4\" fill=\"" << colour << "\" cx=\"" << x(plans[i].best.rows) << "\" cy=\""
          << y(plans[i].best.tokens_per_second) << "\"/>";
    }
    out << "<text x=\"560\" y=\"" << 250 + 18 * i << "\" fill=\"" << colour << "\">" << name_of(plans[i].how)
        << "</text>\n";
  }
  if (step != nullptr) {
    std::string const title = "one step of " + std::to_string(plans.back().best.rows) + " requests, " +
      std::to_string(plans.back().best.offloaded) + " of them offloaded (" + name_of(plans.back().how) + "), simulated";
    draw_step(out, *step, title.c_str(), 400);
  }
  out << "</svg>\n";
}

}  // namespace plan_capacity
