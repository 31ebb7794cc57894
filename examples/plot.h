// SPDX-License-Identifier: Apache-2.0
// Curves in one picture, as SVG.
#pragma once

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

namespace plot {

/// Points joined by a line, or as rings; values of `y` beyond those of `x` are left out.
struct Curve {
  std::string name, colour;
  std::vector<double> x, y;
  double width = 2;
  bool rings = false;
};

/// What `values` are on average over `reach` places either side, for curves of single batches.
inline std::vector<double> smooth(const std::vector<double>& values, std::size_t reach) {
  std::vector<double> means(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t first = i - std::min(i, reach), last = std::min(values.size(), i + reach + 1);
    for (std::size_t k = first; k < last; ++k) means[i] += values[k] / static_cast<double>(last - first);
  }
  return means;
}

/// 1, 2 or 5 times a power of ten, for about five ticks up to `top`.
inline double tick(double top) {
  const double power = std::pow(10, std::floor(std::log10(top / 5))), ratio = top / 5 / power;
  return power * (ratio < 1.5 ? 1 : ratio < 3.5 ? 2 : ratio < 7.5 ? 5 : 10);
}

/// Writes curves of values from 0 up; later ones lie over earlier ones.
inline void write(const std::string& path, const std::string& title, const std::string& x_label,
                  const std::string& y_label, const std::vector<Curve>& curves) {
  constexpr double kLeft = 60, kTop = 40, kWidth = 640, kHeight = 320;
  double x_top = 1e-9, y_top = 1e-9;
  for (const Curve& c : curves) {
    for (double v : c.x) x_top = std::max(x_top, v);
    for (std::size_t i = 0; i < c.x.size(); ++i) y_top = std::max(y_top, c.y[i] * 1.05);
  }
  const auto x = [&](double v) { return kLeft + v / x_top * kWidth; };
  const auto y = [&](double v) { return kTop + kHeight - v / y_top * kHeight; };
  std::ofstream out(path);
  out << "<svg xmlns='http://www.w3.org/2000/svg' width='740' height='420' font-family='sans-serif' font-size='12'>\n"
      << "<rect width='740' height='420' fill='white'/>\n<text x='60' y='24' font-size='15'>" << title << "</text>\n";
  for (double v = 0; v <= y_top; v += tick(y_top)) {
    out << "<path d='M" << kLeft << ' ' << y(v) << "h" << kWidth << "' stroke='#dddddd'/><text x='52' y='" << y(v) + 4
        << "' text-anchor='end'>" << v << "</text>\n";
  }
  for (double v = 0; v <= x_top; v += tick(x_top)) {
    out << "<path d='M" << x(v) << ' ' << kTop + kHeight << "v5' stroke='black'/><text x='" << x(v)
        << "' y='380' text-anchor='middle'>" << v << "</text>\n";
  }
  out << "<path d='M60 40v320h640' fill='none' stroke='black'/><text x='380' y='404' text-anchor='middle'>" << x_label
      << "</text><text transform='translate(18 200) rotate(-90)' text-anchor='middle'>" << y_label << "</text>\n";
  double key = kTop + 16;  // the legend's next line
  for (const Curve& c : curves) {
    const std::string stroke = "' fill='none' stroke='" + c.colour + "' stroke-width='" + std::to_string(c.width);
    const auto ring = [&](double a, double b) { out << "<circle r='4' cx='" << a << "' cy='" << b << stroke << "'/>"; };
    if (c.rings) {
      for (std::size_t i = 0; i < c.x.size(); ++i) ring(x(c.x[i]), y(c.y[i]));
      ring(520, key);
    } else {
      out << "<polyline points='";
      for (std::size_t i = 0; i < c.x.size(); ++i) out << x(c.x[i]) << ',' << y(c.y[i]) << ' ';
      out << stroke << "'/>\n<path d='M505 " << key << "h30" << stroke << "'/>";
    }
    out << "<text x='545' y='" << key + 4 << "'>" << c.name << "</text>\n";
    key += 20;
  }
  out << "</svg>\n";
}

}  // namespace plot
