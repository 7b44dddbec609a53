// What the kernels compute, in double, by the formulas as they are written in papers: no fusing, no stable forms, no
// code of the kernels.
#pragma once

#include "elements.h"

#include <numeric>

namespace gradscale::test {

using Row = std::vector<double>;

// A row's loss, decoded prediction and gradient (for a coefficient of 1). A scale is the sum of the magnitudes of what
// is added up: the errors of rounding are in proportion to it.
struct Truth {
  double loss = 0;
  double loss_scale = 0;
  Row gradient;
  Row gradient_scale;
};

struct Softmax {
  Row p;
  Row log_p;
  Row p_scale;    // an exponential's error is in proportion to its exponent too
  double largest; // logit
};

inline Softmax softmax(const Row& x) {
  Softmax result{x, x, x, -kInfinity};
  for (const double logit : x) {
    result.largest = logit > result.largest ? logit : result.largest;
  }
  double sum = 0;
  for (const double logit : x) {
    sum += std::exp(logit - result.largest);
  }
  for (size_t j = 0; j < x.size(); ++j) {
    result.p[j] = std::exp(x[j] - result.largest) / sum;
    result.log_p[j] = x[j] - result.largest - std::log(sum);
    result.p_scale[j] = result.p[j] == 0 ? 0 : result.p[j] * (1 - result.log_p[j] / 32);
  }
  return result;
}

inline Row smoothed(Row target, double label_smoothing) {
  if (label_smoothing != 0) {
    for (double& t : target) {
      t = t * (1 - label_smoothing) + label_smoothing / static_cast<double>(target.size());
    }
  }
  return target;
}

// -sum_j p_j log p_j, where 0 times anything is 0; without a gradient.
inline Truth entropy(const Row& x) {
  const Softmax softmax_of_row = softmax(x);
  Truth truth;
  for (size_t j = 0; j < x.size(); ++j) {
    const double p = softmax_of_row.p[j];
    truth.loss -= p == 0 ? 0 : p * softmax_of_row.log_p[j];
    truth.loss_scale += p == 0 ? 0 : softmax_of_row.p_scale[j] * (1 + std::fabs(softmax_of_row.log_p[j]));
  }
  return truth;
}

// -sum_j t_j log p_j - w H(p) [+ sum_j t_j log t_j], where 0 times anything is 0.
inline Truth soft_cross_entropy(const Row& x, const Row& target, double entropy_weight, bool subtract_entropy) {
  const Softmax softmax_of_row = softmax(x);
  const Row& p = softmax_of_row.p;
  const Row& log_p = softmax_of_row.log_p;
  double entropy = 0;
  Truth truth;
  for (size_t j = 0; j < x.size(); ++j) {
    const double cost = target[j] == 0 ? 0 : -target[j] * log_p[j];
    const double own = subtract_entropy && target[j] != 0 ? target[j] * std::log(target[j]) : 0;
    truth.loss += cost + own;
    truth.loss_scale += std::fabs(cost) + std::fabs(own);
    entropy -= p[j] == 0 ? 0 : p[j] * log_p[j];
  }
  if (entropy_weight != 0) {
    truth.loss -= entropy_weight * entropy;
    truth.loss_scale += std::fabs(entropy_weight * entropy);
  }
  const double target_sum = std::accumulate(target.begin(), target.end(), 0.0);
  for (size_t j = 0; j < x.size(); ++j) {
    double gradient = target_sum * p[j] - target[j];
    double scale = std::fabs(target_sum) * softmax_of_row.p_scale[j] + std::fabs(target[j]);
    if (entropy_weight != 0 && p[j] != 0) {
      gradient += entropy_weight * p[j] * (log_p[j] + entropy);
      scale += std::fabs(entropy_weight) * softmax_of_row.p_scale[j] *
               (std::fabs(log_p[j]) + entropy + std::fabs(softmax_of_row.largest) + std::fabs(x[j]));
    }
    truth.gradient.push_back(gradient);
    truth.gradient_scale.push_back(scale);
  }
  return truth;
}

inline double sign_of(double x) {
  return x < 0 ? -1 : 1;
}

inline double textbook_transform(Transform transform, double x, double eps) {
  switch (transform) {
    case Transform::signed_hyperbolic:
      return sign_of(x) * (std::sqrt(std::fabs(x) + 1) - 1) + eps * x;
    case Transform::symlog:
      return sign_of(x) * std::log(std::fabs(x) + 1);
    default:
      return x;
  }
}

// By bisection.
inline double inverted(Transform transform, double y, double eps) {
  if (transform == Transform::identity || !std::isfinite(y)) {
    return y;
  }
  double low = -1, high = 1;
  while (textbook_transform(transform, low, eps) > y) {
    low *= 2;
  }
  while (textbook_transform(transform, high, eps) < y) {
    high *= 2;
  }
  for (int i = 0; i < 200; ++i) {
    const double middle = 0.5 * (low + high);
    (textbook_transform(transform, middle, eps) < y ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

// Of the inverse, at the y that x is transformed to.
inline double inverse_slope(Transform transform, double x, double eps) {
  switch (transform) {
    case Transform::signed_hyperbolic:
      return 1 / (0.5 / std::sqrt(std::fabs(x) + 1) + eps);
    case Transform::symlog:
      return 1 + std::fabs(x);
    default:
      return 1;
  }
}

// A support with its centres, transformed and as values.
struct Centers {
  Support support;
  Row transformed;
  Row values;

  explicit Centers(const Support& of) : support(of) {
    for (int32_t j = 0; j < of.num_bins; ++j) {
      transformed.push_back(of.minimum + j * (of.maximum - of.minimum) / (of.num_bins - 1));
      values.push_back(inverted(of.transform, transformed.back(), of.eps));
    }
  }

  const Row& of_expectation() const {
    return support.raw ? values : transformed;
  }

  // A target in the coordinates of `centers`, within them.
  double clamped(double x, const Row& centers) const {
    const double y = &centers == &values ? x : textbook_transform(support.transform, x, support.eps);
    return std::isnan(y) ? kNaN : std::min(std::max(y, centers.front()), centers.back());
  }

  // Each bin's mass falls from 1 at its own centre to 0 at the neighbouring ones.
  Row two_hot(double x) const {
    const Row& centers = of_expectation();
    const double y = clamped(x, centers);
    Row mass(centers.size(), std::isnan(y) ? kNaN : 0.0);
    for (size_t j = 0; j < centers.size() && !std::isnan(y); ++j) {
      if (j > 0 && y >= centers[j - 1] && y <= centers[j]) {
        mass[j] = (y - centers[j - 1]) / (centers[j] - centers[j - 1]);
      } else if (j + 1 < centers.size() && y >= centers[j] && y <= centers[j + 1]) {
        mass[j] = (centers[j + 1] - y) / (centers[j + 1] - centers[j]);
      }
    }
    return mass;
  }

  Row hl_gauss(double x, double sigma_ratio) const {
    const double y = clamped(x, transformed);
    const double width = (support.maximum - support.minimum) / (support.num_bins - 1);
    const auto cumulative = [&](size_t edge) {
      const double at = transformed[0] + (static_cast<double>(edge) - 0.5) * width;
      return std::erf((at - y) / width / std::sqrt(2.0) / sigma_ratio);
    };
    const double total = cumulative(transformed.size()) - cumulative(0);
    Row mass;
    for (size_t j = 0; j < transformed.size(); ++j) {
      mass.push_back((cumulative(j + 1) - cumulative(j)) / total);
    }
    return mass;
  }
};

// The value of a row of logits, and its derivative.
inline Truth decoded(const Row& x, const Centers& centers) {
  const Softmax softmax_of_row = softmax(x);
  const Row& c = centers.of_expectation();
  const Support& support = centers.support;
  double expected = 0, scale = 0;
  for (size_t j = 0; j < x.size(); ++j) {
    expected += softmax_of_row.p[j] * c[j];
    scale += softmax_of_row.p[j] * std::fabs(c[j]);
  }
  // The moment that the kernels take runs over integers as large as the whole support.
  scale = support.raw ? scale : std::max(std::fabs(support.minimum), std::fabs(support.maximum));
  Truth truth;
  truth.loss = support.raw ? expected : inverted(support.transform, expected, support.eps);
  const double slope = support.raw ? 1 : inverse_slope(support.transform, truth.loss, support.eps);
  truth.loss_scale = slope * scale + std::fabs(truth.loss);
  for (size_t j = 0; j < x.size(); ++j) {
    truth.gradient.push_back(softmax_of_row.p[j] * slope * (c[j] - expected));
    truth.gradient_scale.push_back(softmax_of_row.p_scale[j] * slope * (std::fabs(c[j]) + std::fabs(expected) + scale));
  }
  return truth;
}

inline Truth mean_squared_error(const Row& x, const Row& target, Transform transform, double eps) {
  Truth truth;
  const double width = static_cast<double>(x.size());
  for (size_t j = 0; j < x.size(); ++j) {
    const double y = textbook_transform(transform, target[j], eps);
    const double size = std::fabs(x[j]) + std::fabs(y);
    truth.loss += (x[j] - y) * (x[j] - y) / width;
    truth.loss_scale += size * size / width;
    truth.gradient.push_back(2 * (x[j] - y) / width);
    truth.gradient_scale.push_back(2 * size / width);
  }
  return truth;
}

inline Truth huber(const Row& x, const Row& target, Transform transform, double eps, double delta) {
  Truth truth;
  const double width = static_cast<double>(x.size());
  for (size_t j = 0; j < x.size(); ++j) {
    const double y = textbook_transform(transform, target[j], eps);
    const double difference = x[j] - y, distance = std::fabs(difference);
    const double slope = distance <= delta ? difference : delta * difference / distance;
    truth.loss += (distance <= delta ? difference * difference / 2 : delta * (distance - delta / 2)) / width;
    truth.loss_scale += std::min(distance, delta) * (std::fabs(x[j]) + std::fabs(y) + delta) / width;
    truth.gradient.push_back((std::isinf(distance) ? std::copysign(delta, difference) : slope) / width);
    truth.gradient_scale.push_back((std::fabs(x[j]) + std::fabs(y)) / width);
  }
  return truth;
}

inline double softplus(double x) {
  return x > 700 ? x : std::log1p(std::exp(x));
}

inline Truth binary_cross_entropy(double x, double target) {
  const double of_one = target == 0 ? 0 : target * softplus(-x);
  const double of_zero = target == 1 ? 0 : (1 - target) * softplus(x);
  const double sigmoid = 1 / (1 + std::exp(-x));
  return {
      of_one + of_zero,
      std::fabs(of_one) + std::fabs(of_zero),
      {sigmoid - target},
      {std::fabs(sigmoid) + std::fabs(target)}};
}

inline Truth negative_cosine(const Row& x, const Row& target, double eps) {
  double xx = 0, tt = 0, xt = 0, scale = 0;
  for (size_t j = 0; j < x.size(); ++j) {
    xx += x[j] * x[j];
    tt += target[j] * target[j];
    xt += x[j] * target[j];
    scale += std::fabs(x[j] * target[j]);
  }
  const double length = std::sqrt(xx) < eps ? eps : std::sqrt(xx);
  const double of_target = std::sqrt(tt) < eps ? eps : std::sqrt(tt);
  Truth truth{-xt / (length * of_target), scale / (length * of_target), {}, {}};
  for (size_t j = 0; j < x.size(); ++j) {
    const double direct = target[j] / (length * of_target);
    const double of_length = std::sqrt(xx) < eps ? 0 : xt / (length * of_target) * x[j] / xx;
    truth.gradient.push_back(of_length - direct);
    truth.gradient_scale.push_back(std::fabs(direct) + std::fabs(of_length));
  }
  return truth;
}

inline Truth quantile_huber(const Row& x, const Row& target, double kappa, bool sums) {
  const auto count = static_cast<double>(x.size());
  const double share = 1 / static_cast<double>(target.size()) / (sums ? 1 : count);
  Truth truth;
  for (size_t i = 0; i < x.size(); ++i) {
    const double fraction = (static_cast<double>(i) + 0.5) / count;
    double gradient = 0, scale = 0;
    for (const double t : target) {
      const double u = t - x[i], distance = std::fabs(u), size = std::fabs(t) + std::fabs(x[i]);
      const double weight = std::fabs(fraction - (u < 0 ? 1 : 0)) * share;
      const bool is_square = distance <= kappa && kappa > 0;
      truth.loss += weight * (is_square ? u * u / 2 / kappa : distance - kappa / 2);
      truth.loss_scale += weight * (size + kappa);
      gradient -= weight * (std::isnan(u) ? u : is_square ? u / kappa : u == 0 ? 0 : sign_of(u));
      scale += weight * (is_square ? size / kappa : 1);
    }
    truth.gradient.push_back(gradient);
    truth.gradient_scale.push_back(scale);
  }
  return truth;
}

// sum_g KL(p || q), at least free_nats; groups of as many classes follow each other.
inline Truth categorical_kl(
    const Row& x, const Row& target, size_t classes, double unimix, double free_nats, bool predicts_p) {
  Truth truth;
  for (size_t first = 0; first < x.size(); first += classes) {
    const auto group_of = [=](const Row& row) {
      return softmax(Row(row.begin() + first, row.begin() + first + classes));
    };
    const Softmax of_x = group_of(x), of_target = group_of(target);
    const auto mixed = [=](const Softmax& of, size_t j) { return of.p[j] * (1 - unimix) + unimix / classes; };
    const auto log_mixed = [=](const Softmax& of, size_t j) {
      return unimix == 0 ? of.log_p[j] : std::log(mixed(of, j));
    };
    Row h, h_scale;
    double sum = 0, scale = 0;
    for (size_t j = 0; j < classes; ++j) {
      const Softmax &of_p = predicts_p ? of_x : of_target, &of_q = predicts_p ? of_target : of_x;
      const double p = mixed(of_p, j), q = mixed(of_q, j), log_p = log_mixed(of_p, j), log_q = log_mixed(of_q, j);
      const double magnitude = p == 0 ? 0 : std::fabs(log_p) + std::fabs(log_q) + 1;
      truth.loss += p == 0 ? 0 : p * (log_p - log_q);
      truth.loss_scale += p * magnitude;
      const double s = of_x.p[j], weight = 1 + std::fabs(of_x.log_p[j]) / 32;
      h.push_back(predicts_p ? (s == 0 ? 0 : s * (log_p - log_q)) : unimix == 0 ? p : s * p / q);
      h_scale.push_back(s == 0 && predicts_p ? 0 : predicts_p ? s * magnitude * weight : std::fabs(h.back()));
      sum += h.back();
      scale += h_scale.back();
    }
    for (size_t j = 0; j < classes; ++j) {
      const double own = of_x.p[j];
      truth.gradient.push_back((1 - unimix) * (predicts_p ? 1 : -1) * (h[j] - own * sum));
      truth.gradient_scale.push_back(
          h_scale[j] * (1 + (own == 0 ? 0 : std::fabs(of_x.log_p[j]) / 32)) + of_x.p_scale[j] * scale);
    }
  }
  if (truth.loss < free_nats) {
    truth.loss = free_nats;
    truth.gradient.assign(x.size(), 0);
  }
  return truth;
}

} // namespace gradscale::test
