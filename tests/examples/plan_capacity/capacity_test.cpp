#include <doctest/doctest.h>
#include <plan_capacity/capacity.hpp>
#include <plan_capacity/curve_picture.hpp>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

using namespace plan_capacity;

namespace {

setting qwen(double gpu_bytes = 141e9)
{
  setting s;
  s.model = *by_name<model_shape>(models, "qwen3-14b");
  s.gpu.memory_bytes = gpu_bytes;
  return s;
}

}  // namespace

TEST_SUITE("plan_capacity")
{
  TEST_CASE("requests that fit: memory over what a request of full length holds")
  {
    setting s = qwen();
    s.prompt_tokens = 65536;
    s.output_tokens = 0;
    // 40 layers x 2 x 8 x 128 elements x 2 bytes = 160 KiB a token, 10 GiB a request; 90 % of 141 GB less 29.6 GB of weights.
    double const request = 65536.0 * 163840.0;
    auto const room = static_cast<std::uint32_t>((141e9 * 0.9 - 29.6e9) / request);
    CHECK(plan(s, way::resident_dense).curve.size() == room);
    CHECK(plan(s, way::resident_dense).limit == "GPU memory");
    s.host_bytes = 20.5 * request;
    CHECK(plan(s, way::offload_all).curve.size() == 20);
    CHECK(plan(s, way::offload_all).limit == "host memory");
  }

  TEST_CASE("a step of dense rows reads weights and cache once")
  {
    setting s = qwen();
    s.output_tokens = 0;
    operating_point const p = point(s, 3, 0, false);
    double const bytes = 14.8e9 * 2 + 3 * 65536.0 * 163840.0;
    CHECK(p.compute == doctest::Approx(1e-3 + bytes / (4.8e12 * 0.8)));
    CHECK(p.recall == 0.0);
    CHECK(p.step == p.compute);
    CHECK(p.tokens_per_second == doctest::Approx(3.0 / p.step));
  }

  TEST_CASE("offloaded rows recall what their selections miss, and write what is new")
  {
    setting s = qwen();
    s.exposed = 0.0;
    operating_point const p = point(s, 0, 10, true);
    CHECK(p.recall == doctest::Approx(10 * (0.08 * 2048 + 1) * 163840.0 / s.gpu.link_bytes_per_second));
    s.hot_tokens = 2048;  // a third of the slots misses 3^0.9 times as much
    CHECK(
      point(s, 0, 10, true).recall == doctest::Approx(10 * (0.08 * 2.688 * 2048 + 1) * 163840.0 / 50e9).epsilon(1e-3));
  }

  TEST_CASE("experts are read as far as rows are routed to them")
  {
    setting s;
    s.model = *by_name<model_shape>(models, "qwen3-30b-a3b");
    double const one = point(s, 1, 0, true).compute, many = point(s, 512, 0, true).compute;
    s.prompt_tokens = s.budget_tokens = s.hot_tokens = 1;
    s.output_tokens = 0;
    CHECK(one < many);
    double const weights = point(s, 100000, 0, false).compute - point(s, 0, 0, false).compute;
    CHECK(weights > 30.5e9 * 2 / (4.8e12 * 0.8) * 0.9);
  }

  TEST_CASE("adaptive is never worse than the best of the others, and offloads nothing while all fits")
  {
    for (model_shape const& model : models) {
      for (double const host : {64e9, 512e9}) {
        for (double const target : {0.0, 0.03}) {
          setting s = qwen();
          s.model = model;
          s.host_bytes = host;
          s.target_seconds = target;
          s.prompt_tokens = 32768;
          if (model.parameters * 2 > 0.9 * 141e9) { continue; }
          capacity_plan const adaptive = plan(s, way::adaptive);
          for (way const other : {way::resident_sparse, way::offload_all}) {
            CHECK(adaptive.best.tokens_per_second >= plan(s, other).best.tokens_per_second * 0.999);
          }
          for (operating_point const& p : adaptive.curve) {
            bool const all_fit = p.rows <= plan(s, way::resident_sparse).curve.size();
            CHECK((p.offloaded == 0) == all_fit);
          }
        }
      }
    }
  }

  TEST_CASE("a target bounds the step of the best point")
  {
    setting s = qwen();
    s.target_seconds = 0.02;
    for (way const how : {way::resident_sparse, way::offload_all, way::adaptive}) {
      CHECK(plan(s, how).best.step <= 0.02);
    }
    s.target_seconds = 1e-6;
    CHECK(plan(s, way::adaptive).best.rows == 0);
  }

  TEST_CASE("settings that cannot be are refused with their numbers")
  {
    auto const text = [](setting const& s) -> std::string {
      try {
        static_cast<void>(plan(s, way::adaptive));
      } catch (std::invalid_argument const& problem) {
        return problem.what();
      }
      return {};
    };
    CHECK(text(qwen(24e9)).find("27.567148 GiB of weights") != std::string::npos);
    setting s = qwen();
    s.hot_tokens = 100;
    CHECK(text(s) == "100 hot tokens, fewer than the budget of 2048");
    s = qwen();
    s.miss_ratio = 1.5;
    CHECK(text(s).find("1.5") != std::string::npos);
    s = qwen();
    s.prompt_tokens = 0;
    CHECK(text(s).find("prompt") != std::string::npos);
  }

  TEST_CASE("the picture has a line for each plan")
  {
    setting const s = qwen();
    std::vector<capacity_plan> const plans{plan(s, way::resident_dense), plan(s, way::adaptive)};
    std::ostringstream out;
    draw_curves(out, s, plans);
    std::string const text = out.str();
    CHECK(text.find("<svg") == 0);
    CHECK(text.find("</svg>") != std::string::npos);
    std::size_t lines = 0;
    for (std::size_t at = text.find("<polyline"); at != std::string::npos; at = text.find("<polyline", at + 1)) {
      ++lines;
    }
    CHECK(lines == 2);
    CHECK(text.find("nan") == std::string::npos);
  }

  TEST_CASE("a simulated step takes what its parts take: never less than computing or recalls, and not much more than "
            "a formula says")
  {
    setting s = qwen();
    s.prompt_tokens = 16384;
    for (std::uint32_t const rows : {8U, 40U, 200U}) {
      operating_point const p = point(s, 0, rows, true);
      step_timeline const t = simulate_step(s, p);
      CAPTURE(rows);
      CHECK(t.rows == std::min(rows, 128U));
      double gpu = 0.0, link = 0.0;
      for (busy_span const& span : t.gpu) {
        gpu += span.end - span.begin;
        CHECK((span.begin >= 0.0 && span.end <= t.step * 1.001));
      }
      for (busy_span const& span : t.link) { link += span.end - span.begin; }
      // Steps differ: the means are those of the formula.
      CHECK(gpu >= 0.97 * p.compute);
      CHECK(gpu <= 1.6 * p.compute);  // a second pass over some layers
      CHECK(link == doctest::Approx(p.recall).epsilon(0.35));
      CHECK(t.step >= std::max(gpu, link));
      CHECK(t.step <= 1.6 * (p.compute + p.recall));
    }
    std::ostringstream out;
    std::vector<capacity_plan> const plans{plan(s, way::adaptive)};
    step_timeline const t = simulate_step(s, plans[0].best);
    draw_curves(out, s, plans, &t);
    CHECK(out.str().find("link</text>") != std::string::npos);
    CHECK(out.str().find("nan") == std::string::npos);
  }
}
