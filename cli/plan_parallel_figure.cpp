// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cli/plan_parallel.h"

namespace halfstep::cli {
namespace {

using io::Chart;
using io::ChartScale;
using io::ChartSeries;
namespace colors = io::colors;

constexpr io::Color kPlanColors[] = {colors::kBlue, colors::kOrange, colors::kGreen, colors::kPink, colors::kYellow};

// Names stand in the legend above both charts. Curves may lie on each other: earlier ones are wider and show below.
ChartSeries line_of(const PlanFigure& figure, std::size_t i) {
  return {.points = {},
          .color = kPlanColors[i % std::size(kPlanColors)],
          .width = 2 + 1.5 * static_cast<double>(figure.series.size() - 1 - i),
          .dots = true};
}

void draw_legend(io::Drawing& drawing, const PlanFigure& figure, io::Point at) {
  constexpr double kText = 11.5, kMark = 16, kSpace = 6, kBetween = 22;
  for (std::size_t i = 0; i < figure.series.size(); ++i) {
    const double middle = at.y - 4;
    drawing.line({at.x, middle}, {at.x + kMark, middle},
                 {.color = kPlanColors[i % std::size(kPlanColors)], .width = 3});
    at.x += kMark + kSpace;
    drawing.text(at, figure.series[i].precision, {.size = kText, .color = colors::kGrey});
    at.x += io::text_width(figure.series[i].precision, kText) + kBetween;
  }
}

Chart efficiency_chart(const PlanFigure& figure) {
  Chart chart{.title = "Scaling efficiency",
              .x_label = "ranks",
              .y_label = "% of the speed without communication",
              .y_min = 0,
              .x_scale = ChartScale::log2};
  chart.x_min = chart.x_max = figure.series[0].rows[0].ranks;
  // The axis ends at 100 %, whatever the curves do.
  ChartSeries top{.points = {}, .color = colors::kPale, .width = 1};
  for (std::size_t i = 0; i < figure.series.size(); ++i) {
    ChartSeries line = line_of(figure, i);
    for (const PlanRow& row : figure.series[i].rows) {
      chart.x_max = std::max(chart.x_max, static_cast<double>(row.ranks));
      line.points.push_back({static_cast<double>(row.ranks), 100 * row.step.efficiency()});
    }
    chart.series.push_back(std::move(line));
  }
  top.points = {{chart.x_min, 100}, {chart.x_max, 100}};
  chart.series.insert(chart.series.begin(), std::move(top));
  return chart;
}

Chart bucket_chart(const PlanFigure& figure) {
  const int ranks = figure.series[0].rows.back().ranks;
  Chart chart{.title = "Step on " + std::to_string(ranks) + " ranks",
              .x_label = "size of buckets, MiB",
              .y_label = "ms (thin: where nothing is sent)",
              .y_min = 0,
              .x_scale = ChartScale::log2};
  chart.x_min = figure.buckets.front() / 0x1p20, chart.x_max = figure.buckets.back() / 0x1p20;
  for (std::size_t i = 0; i < figure.series.size(); ++i) {
    const PlanSeries& series = figure.series[i];
    ChartSeries line = line_of(figure, i);
    for (std::size_t b = 0; b < figure.buckets.size(); ++b) {
      line.points.push_back({figure.buckets[b] / 0x1p20, 1e3 * series.rows.back().of_buckets[b]});
    }
    // What is left where nothing is sent.
    ChartSeries compute{.points = {{chart.x_min, 1e3 * series.compute}, {chart.x_max, 1e3 * series.compute}},
                        .color = line.color,
                        .width = 0.8};
    chart.series.insert(chart.series.begin(), std::move(compute));
    chart.series.push_back(std::move(line));
  }
  return chart;
}

}  // namespace

io::Drawing draw_plan(const PlanFigure& figure) {
  constexpr double kWidth = 480, kHeight = 330, kTop = 76, kMargin = 12;
  io::Drawing drawing(2 * kWidth + 2 * kMargin, kTop + kHeight + kMargin, figure.title);
  drawing.text({kMargin + 8, 26}, io::fitted_text(figure.title, 16, 2 * kWidth - 16), {.size = 16, .bold = true});
  drawing.text({kMargin + 8, 45}, io::fitted_text(figure.subtitle, 11.5, 2 * kWidth - 16),
               {.size = 11.5, .color = colors::kGrey});
  draw_legend(drawing, figure, {kMargin + 8, 66});
  draw_chart(drawing, {kMargin, kTop, kWidth, kHeight}, efficiency_chart(figure));
  if (figure.buckets.size() > 1) {
    draw_chart(drawing, {kMargin + kWidth, kTop, kWidth, kHeight}, bucket_chart(figure));
  }
  return drawing;
}

}  // namespace halfstep::cli
