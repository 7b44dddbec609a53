"""The formulas of logits and policies are in csrc/formulas alone, and comparisons with the reference find their errors.

Each fault replaces an expression, and must change the results of exactly the engines or heads that use it, on a CPU and
on a GPU. One copy of csrc has all faults, and chooses one when it runs, so that it is compiled once.
"""

from __future__ import annotations

import collections
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import engines
import pytest
from native import ROOT, compile_library, one_process
from policies import CASES

import gradscale_ext as gs

pytestmark = one_process

CPU, GPU = {"rows", "short rows"}, {"lanes", "blocks", "thread groups"}
EVERY, OF_BINS = CPU | GPU, {"rows", "short rows", "lanes", "thread groups"}


def cases(condition):
    """The cases of policies whose head fulfils a condition."""
    return {name for name in engines.POLICIES if "value" not in name and condition(CASES[name][0], CASES[name][1] or 0)}


POLICY, VALUE, CLIPPED_VALUE = cases(lambda *_: True), {"value", "clipped value"}, {"clipped value"}
PPO, LOG, CISPO = (cases(lambda head, _, name=name: head.surrogate == name) for name in ("ppo", "log", "cispo"))
RATIO = PPO | CISPO
CLIPPED = cases(lambda head, _: head.bounds is not None)
DUAL = cases(lambda head, _: head.dual_clip is not None)
K3 = cases(lambda head, _: head.kl_weight != 0)
BONUS = cases(lambda head, _: head.entropy_weight != 0)
NORMAL = cases(lambda head, _: isinstance(head, gs.GaussianPolicyGradient))
SHARED = {"shared 6"}
LOGITS, SCALARS = POLICY - NORMAL - {"log-probabilities"}, {"log-probabilities", *VALUE}
LONG = LOGITS & cases(lambda _, width: width > 32)  # on a CPU
SHORT = LOGITS - LONG
CHOICES = {"choices", "many choices"}

# By suite, file of csrc and right expression: wrong expressions, and whose results they change: on both processors, or
# on a CPU and on a GPU. `=` and `return` in front of a right expression stay.
FAULTS = {
    "logits": {
        "formulas/cross_entropy.h": {
            "product(t, d)": {"A(0) - product(t, d)": EVERY},
            "t * finite(d)": {"A(0) - t * finite(d)": {"lanes", "blocks"}},
            "correct(t, x)": {"A(0) - correct(t, x)": {"lanes", "blocks"}},
            "t * std::log(t)": {"A(0) - t * std::log(t)": EVERY},
            "e * finite(d)": {"A(0) - e * finite(d)": EVERY},
            "log_sum(sums) - sums[kWeighted] / sums[kSum]": {"log_sum(sums) + sums[kWeighted] / sums[kSum]": EVERY},
            "subtracted - sums[kNegativeEntropy]": {"subtracted + sums[kNegativeEntropy]": EVERY},
            "subtracted + entropy_weight * entropy(sums)": {"subtracted - entropy_weight * entropy(sums)": EVERY},
            "sums[kMass] * log_sum(sums) - subtracted": {"sums[kMass] * log_sum(sums) + subtracted": EVERY},
            "coefficient * inverse_sum * sums[kMass]": {"A(0) - coefficient * inverse_sum * sums[kMass]": EVERY},
            "sums[kWeighted] * inverse_sum": {"A(0) - sums[kWeighted] * inverse_sum": EVERY},
            "e * row.per_exponential": {"A(0) - e * row.per_exponential": EVERY},
            "row.coefficient * t": {"A(0) - row.coefficient * t": EVERY},
            "row.per_exponential * e": {"A(0) - row.per_exponential * e": {"lanes"}},
            "t - entropy_weight * (e * row.inverse_sum * (finite(d) - row.expected))": {
                "t + entropy_weight * (e * row.inverse_sum * (finite(d) - row.expected))": EVERY,
            },
        },
        "formulas/targets.h": {
            "position - bin": {"bin - position": OF_BINS},
            "position - center": {"center - position": OF_BINS},
            "high - low": {"low - high": {"rows", "short rows", "thread groups"}},
            "1.0f": {"-1.0f": EVERY},
            "1 - label_smoothing": {"label_smoothing - 1": EVERY},
            "label_smoothing / static_cast<double>(width)": {"-label_smoothing / static_cast<double>(width)": EVERY},
            "t * share + everywhere": {"t * share - everywhere": EVERY},
        },
        "loss/cuda/lane_losses.cuh": {
            "low - high + (has_middle ? 2.0f : 0.0f)": {"high - low - (has_middle ? 2.0f : 0.0f)": {"lanes"}},
        },
    },
    "policies": {
        "formulas/policy.h": {
            # The numbers of a head
            "1 - head.clip_low": {"1 - head.clip_high": {"ppo 18", "cispo 9"}, "-INFINITY": CLIPPED},
            "1 + head.clip_high": {"1 + head.clip_low": {"ppo 18", "cispo 9"}, "INFINITY": CLIPPED},
            "static_cast<A>(head.dual_clip)": {"A(INFINITY)": DUAL, "static_cast<A>(head.dual_clip - 1)": DUAL},
            "static_cast<A>(head.kl_weight)": {"A(0)": K3, "static_cast<A>(2 * head.kl_weight)": K3},
            # The ratio
            "exponential(log_prob - old_log_prob)": {
                "exponential(old_log_prob - log_prob)": RATIO,
                "exponential(log_prob)": RATIO,
                "exponential(A(2) * (log_prob - old_log_prob))": RATIO,
                "log_prob - old_log_prob": RATIO,
                "A(1) + log_prob - old_log_prob": RATIO,
            },
            "r < lower ? lower : (upper < r ? upper : r)": {
                "r": CLIPPED,
                "upper < r ? upper : r": CLIPPED,
                "r < lower ? lower : r": CLIPPED,
                "r < lower ? upper : (upper < r ? lower : r)": CLIPPED,
                "lower": RATIO,
            },
            # "log"
            "product(advantage, -log_prob) + nan": {
                "product(advantage, log_prob)": LOG,
                "product(advantage, A(-2) * log_prob)": LOG,
                "-log_prob": LOG,
            },
            "-advantage + nan": {"advantage": LOG, "A(-2) * advantage": LOG, "A(-1)": LOG, "A(0)": LOG},
            # "cispo"
            "weighted = product(advantage, clamped(r))": {
                "product(advantage, r)": CISPO,
                "advantage": CISPO,
                "clamped(r)": CISPO,
                "std::fmin(advantage * r, advantage * clamped(r))": CISPO,
            },
            "product(weighted, -log_prob) + nan": {"-weighted": CISPO, "product(advantage, -log_prob)": CISPO},
            "-weighted + nan": {
                "weighted": CISPO,
                "-advantage": CISPO,
                "-weighted * r": CISPO,
                "r == clamped(r) ? -weighted : A(0)": CISPO,
            },
            # "ppo"
            "plain = product(advantage, r)": {"advantage": PPO, "r": PPO, "A(2) * product(advantage, r)": PPO},
            "limited = product(advantage, clamped(r))": {"product(advantage, r)": PPO & CLIPPED, "clamped(r)": PPO},
            "limited < plain": {
                "plain < limited": PPO & CLIPPED,
                "advantage > A(0) && limited < plain": PPO & CLIPPED,
                "advantage < A(0) && limited < plain": PPO & CLIPPED,
                "limited <= plain": PPO,
            },
            "-(is_limited ? limited : plain)": {
                "-plain": PPO & CLIPPED,
                "-limited": PPO & CLIPPED,
                "is_limited ? limited : plain": PPO,
            },
            "is_limited ? A(0) : -plain": {
                "-plain": PPO & CLIPPED,
                "is_limited ? -limited : -plain": PPO & CLIPPED,
                "is_limited ? A(0) : -advantage": PPO,
                "is_limited ? A(0) : plain": PPO,
            },
            "-dual_clip * advantage": {"-(A(1) + dual_clip) * advantage": DUAL, "-upper * advantage": PPO & CLIPPED},
            "advantage < A(0) && loss > most": {
                "false": DUAL,
                "loss > most": PPO,
                "advantage < A(0)": PPO,
                "advantage < A(0) && loss < most": PPO,
            },
            "(exceeds ? most : loss) + nan": {"loss": DUAL, "exceeds ? -most : loss": DUAL},
            "(exceeds ? A(0) : slope) + nan": {"slope": DUAL, "exceeds ? most : slope": DUAL},
            # The divergence from a reference policy
            "fields.reference_log_prob - log_prob": {
                "log_prob - fields.reference_log_prob": K3,
                "fields.log_prob - log_prob": K3,
                "fields.reference_log_prob - fields.log_prob": K3,
            },
            "kl_weight * k3.value": {"k3.value": K3, "-kl_weight * k3.value": K3, "A(0)": K3},
            "kl_weight * k3.derivative": {"k3.derivative": K3, "-kl_weight * k3.derivative": K3, "A(0)": K3},
            "series * x * (A(1) / static_cast<A>(n))": {
                "series * x": POLICY,
                "series * x * (A(1) / static_cast<A>(n - 1))": POLICY,
            },
            "series * (A(0.5) * x * x)": {"series * x * x": POLICY, "series * (A(0.5) * x)": POLICY},
            "is_small ? series + x : e - A(1)": {"is_small ? series : e - A(1)": RATIO},
            # approx_kl and clip_fraction
            "exponential_beyond(log_prob - old_log_prob)": {
                "exponential_beyond(old_log_prob - log_prob)": POLICY,
                "exponential_beyond(log_prob)": POLICY,
            },
            "is_illegal ? infinity + nan_if(old_log_prob != old_log_prob) : beyond.value": {
                "beyond.derivative": POLICY,
                "A(2) * beyond.value": POLICY,
            },
            "beyond.derivative + A(1)": {"beyond.value": CLIPPED},
            "r < lower || upper < r ? A(1) : A(0)": {
                "r < lower ? A(1) : A(0)": CLIPPED,
                "upper < r ? A(1) : A(0)": CLIPPED,
                "r < lower || upper < r ? r : A(0)": CLIPPED,
            },
            # The bonus
            "loss - product(entropy_weight, entropy)": {
                "loss": BONUS,
                "loss + product(entropy_weight, entropy)": BONUS,
                "loss - A(2) * product(entropy_weight, entropy)": BONUS,
                "loss * (A(1) - product(entropy_weight, entropy))": BONUS,
                "loss - entropy": LOGITS | NORMAL,
            },
            # Clipped values
            "error = value - target": {"target - value": VALUE, "value - old_value": VALUE},
            "clip == static_cast<A>(INFINITY)": {"true": CLIPPED_VALUE},
            "A(2) * error": {"error": VALUE - CLIPPED_VALUE, "A(0)": VALUE - CLIPPED_VALUE},
            "change = value - old_value": {"value": CLIPPED_VALUE, "old_value - value": CLIPPED_VALUE},
            "change < -clip ? -clip : (clip < change ? clip : change)": {
                "change": CLIPPED_VALUE,
                "change < -clip ? -clip : change": CLIPPED_VALUE,
                "clip < change ? clip : change": CLIPPED_VALUE,
                "clip": CLIPPED_VALUE,
            },
            "old_value + kept - target": {
                "kept - target": CLIPPED_VALUE,
                "old_value - target": CLIPPED_VALUE,
                "value + kept - target": CLIPPED_VALUE,
            },
            "error * error >= kept_error * kept_error": {
                "error * error <= kept_error * kept_error": CLIPPED_VALUE,
                "true": CLIPPED_VALUE,
                "false": CLIPPED_VALUE,
                "error >= kept_error": CLIPPED_VALUE,
            },
            "(is_first ? error * error : kept_error * kept_error) + nan": {
                "error * error": CLIPPED_VALUE,
                "A(0.5) * (is_first ? error * error : kept_error * kept_error)": CLIPPED_VALUE,
            },
            "A(2) * (is_first ? error : (kept == change ? kept_error : A(0))) + nan": {
                "A(2) * error": CLIPPED_VALUE,
                "A(2) * (is_first ? error : kept_error)": CLIPPED_VALUE,
                "is_first ? error : (kept == change ? kept_error : A(0))": CLIPPED_VALUE,
            },
        },
        "formulas/distributions.h": {
            # Choices
            "return others + chosen_e": {"others": LOGITS, "A(2) * others + chosen_e": LOGITS},
            "all = others + chosen_e": {"others": LOGITS, "A(2) * others + chosen_e": LOGITS},
            "chosen_e > others ? log_all + lost / all : log_all": {"-log_all": LOGITS, "all": LOGITS},
            "chosen_difference - log_sum()": {
                "-log_sum()": (LONG, LOGITS),
                "chosen_difference": (LONG, LOGITS),
                "chosen_difference + log_sum()": (LONG, LOGITS),
            },
            "log_sum() - weighted / sum()": {
                "log_sum()": (LONG, LOGITS),
                "log_sum() - weighted": (LONG, LOGITS),
                "log_sum() + weighted / sum()": (LONG, LOGITS),
            },
            "A(1) / sums.sum()": {"A(1)": LOGITS, "A(1) / sums.others": LOGITS},
            "sums.weighted * inverse_sum": {"sums.weighted": LOGITS & BONUS, "A(0)": LOGITS & BONUS},
            "slope_of_p = -slope * inverse_sum": {
                "slope * inverse_sum": LOGITS,
                "A(-2) * slope * inverse_sum": LOGITS,
                "-inverse_sum": LOGITS,
            },
            "of_entropy = entropy_weight * (e * inverse_sum * ((d < A(-3e38f) ? A(-3e38f) : d) - expected))": {
                "A(0)": (LONG & BONUS, LOGITS & BONUS),
                "-entropy_weight * (e * inverse_sum * (d - expected))": (LONG & BONUS, LOGITS & BONUS),
                "entropy_weight * (e * (d - expected))": (LONG & BONUS, LOGITS & BONUS),
            },
            "is_chosen ? -others : e": {
                "e": (LONG & BONUS, LOGITS),
                "is_chosen ? others : e": (LONG & BONUS, LOGITS),
                "is_chosen ? A(-1) : e": (LONG & BONUS, LOGITS),
                "is_chosen ? -others : A(0)": (set(), LOGITS),
            },
            # Normal distributions
            "(action - mean) * inverse_scale": {
                "(mean - action) * inverse_scale": NORMAL,
                "action * inverse_scale": NORMAL,
                "action - mean": NORMAL,
            },
            "exponential(-log_scale)": {
                "exponential(log_scale)": (set(), NORMAL),
                "exponential(A(-2) * log_scale)": (set(), NORMAL),
            },
            "A(-0.5) * z * z - log_scale": {
                "A(0.5) * z * z - log_scale": NORMAL,
                "-z * z - log_scale": NORMAL,
                "A(-0.5) * z * z": NORMAL,
                "A(-0.5) * z * z + log_scale": NORMAL,
            },
            "static_cast<A>(0.91893853320467274178)": {"A(0)": NORMAL},
            "log_scale + static_cast<A>(1.41893853320467274178)": {
                "static_cast<A>(1.41893853320467274178)": NORMAL,
                "-log_scale + static_cast<A>(1.41893853320467274178)": NORMAL,
                "log_scale": NORMAL,
            },
            "product(slope, z * inverse_scale)": {
                "-product(slope, z * inverse_scale)": NORMAL,
                "product(slope, z)": NORMAL,
                "z * inverse_scale": NORMAL,
            },
            "product(slope, z * z - A(1)) - entropy_weight": {
                "product(slope, z * z) - entropy_weight": NORMAL,
                "product(slope, A(1) - z * z) - entropy_weight": NORMAL,
                "product(slope, z * z - A(1))": NORMAL & BONUS,
                "product(slope, z * z - A(1)) + entropy_weight": NORMAL & BONUS,
            },
        },
        "loss/cpu/policy_rows.h": {
            "formula.difference(log_prob[i], old.at[i])": {"formula.difference(log_prob[i], A(0))": POLICY},
            "with_bonus(losses[i], entropy_weight, entropy[i])": {"losses[i]": BONUS},
            "gradients[i] * static_cast<A>(row_batch.coefficients[i])": {"gradients[i]": SCALARS},
            "others += e * (one - t)": {"e": SHORT},
            "weighted += Formula::weighted(e, d)": {"d": SHORT},
            "chosen_e += e * t": {"e": SHORT},
            "chosen_difference += Formula::correct(t, d)": {"d": SHORT},
            "sums[c].chosen_difference[i] - log_sum": {
                "sums[c].chosen_difference[i]": SHORT,
                "sums[c].chosen_difference[i] - log_sum - log_prob[i]": {"choices"},
            },
            "log_sum - sums[c].weighted[i] / (others + chosen_e)": {
                "log_sum + sums[c].weighted[i] / (others + chosen_e)": SHORT,
                "log_sum - sums[c].weighted[i] / (others + chosen_e) - entropy[i]": {"choices"},
            },
            "gradient.slope_of_p * (e * (one - t) - t * gradient.others)": {
                "gradient.slope_of_p * (e - t)": SHORT,
                "gradient.slope_of_p * e": SHORT,
            },
            "weight * (e * (CrossEntropy<Lanes<A>, 0>::finite(differences.column(j)) - gradient.expected))": {
                "weight * (e * differences.column(j))": SHORT & BONUS,
                "e * (differences.column(j) - gradient.expected)": SHORT & BONUS,
            },
            "sums.chosen_e = values[action]": {"A(0)": LONG},
            "CrossEntropy<A, 0>::weighted(sums.chosen_e, sums.chosen_difference)": {"A(0)": LONG},
            "e * (scale + weight * (CrossEntropy<Lanes<A>, 0>::finite(d) - expected))": {
                "e * scale": LONG & BONUS,
                "e * (scale + weight * d)": LONG & BONUS,
            },
            "formula.at(values[action], own.sums.chosen_difference, true)": {
                "formula.at(values[action], own.sums.chosen_difference, false)": LONG & BONUS,
            },
            "values[action] = -own.sums.others": {"own.sums.others": LONG - BONUS, "A(-1)": LONG - BONUS},
            "log_prob[0] += choice.sums.log_prob()": {"choice.sums.log_prob() - log_prob[0]": {"many choices"}},
            "entropy[0] += choice.sums.entropy()": {"choice.sums.entropy() - entropy[0]": {"many choices"}},
            "exponential(-common[j])": {"exponential(common[j])": SHARED},
            "exponential(-log_scales.at[j][i])": {"exponential(log_scales.at[j][i])": NORMAL - SHARED},
            "slope = load_lanes(slopes) * factors": {"load_lanes(slopes)": NORMAL},
            "weight = Lanes<A>(static_cast<A>(s.head->entropy_weight)) * factors": {"Lanes<A>(A(0))": NORMAL & BONUS},
            "counts_scales = log_scale_gradient.data != nullptr && !s.shares_scales": {
                "log_scale_gradient.data != nullptr": SHARED,
                "false": NORMAL - SHARED,
            },
            "counts[i] == A(0) ? A(0) : gradients.at[j][i]": {"gradients.at[j][i]": SHARED},
            "total(load_lanes(counted))": {"counted[0]": SHARED},
        },
        "loss/cpu/samples.cpp": {
            "counts ? rows[b].divergence : T(0)": {"rows[b].divergence": POLICY},
            "counts ? rows[b].clipped : T(0)": {"rows[b].clipped": CLIPPED},
        },
        "loss/cuda/policy_rows.cuh": {
            "formula.difference(log_prob, fields.log_prob)": {"formula.difference(log_prob, A(0))": POLICY},
            "score.slope * static_cast<A>(task.factor.coefficient)": {"score.slope": SCALARS},
            "others += first + k == action ? A(0) : e": {"e": LOGITS},
            "weighted += e * CrossEntropy<A, 0>::finite(d)": {"d": LOGITS},
            "static_cast<A>(to_accumulate(logits.logits[action])) - maximum": {"-maximum": LOGITS},
            "sums.chosen_e = exp_nonpositive(sums.chosen_difference)": {"A(0)": LOGITS},
            "formula.at(exp_nonpositive(d), d, first + k == action) * coefficient": {
                "formula.at(exp_nonpositive(d), d, false) * coefficient": LOGITS,
                "formula.at(exp_nonpositive(d), d, first + k == action)": LOGITS,
            },
            "log_prob += choice.sums.log_prob()": {"choice.sums.log_prob() - log_prob": CHOICES},
            "entropy += choice.sums.entropy()": {"choice.sums.entropy() - entropy": CHOICES},
            "loss = with_bonus(score.loss, static_cast<A>(head.entropy_weight), entropy)": {
                "score.loss": LOGITS & BONUS,
            },
            "first + k < task.width ? term.log_prob(term.z, term.log_scale) : A(0)": {
                "term.log_prob(term.z, term.log_scale)": {"normal 1", "normal 17"},
            },
            "first + k < task.width ? term.entropy(term.log_scale) : A(0)": {
                "term.entropy(term.log_scale)": {"normal 1", "normal 17"},
            },
            "slope = score.slope * coefficient": {"score.slope": NORMAL},
            "weight = entropy_weight * coefficient": {"entropy_weight": NORMAL & BONUS},
            "counts ? term.log_scale_gradient(slope, weight) : A(0)": {
                "term.log_scale_gradient(slope, weight)": NORMAL,
            },
            "scale_gradient.data == nullptr || task.block.segment.shares_scales": {"false": SHARED},
            "with_bonus(score.loss, entropy_weight, entropy)": {"score.loss": NORMAL & BONUS},
        },
        "loss/cuda/totals.cuh": {
            "fields[kDifferences].load(sample_, 0)": {"fields[kDifferences].load(sample_, 1)": POLICY},
            "fields[kDifferences].load(sample_, 1)": {"fields[kDifferences].load(sample_, 0)": POLICY},
            "c.approx_kl.data != nullptr && is_unmasked": {"c.approx_kl.data != nullptr": POLICY},
        },
    },
    "extremes": {
        "formulas/policy.h": {
            # The ratio
            "log_prob == -static_cast<A>(INFINITY) ? A(0) : exponential(log_prob - old_log_prob)": {
                "exponential(log_prob - old_log_prob)": {"cispo", "impossible", "no clip", "normal", "ppo"},
                "log_prob == -static_cast<A>(INFINITY) ? A(1) : exponential(log_prob - old_log_prob)": {
                    "cispo",
                    "impossible",
                    "infinite entropy",
                    "no clip",
                    "normal",
                    "ppo",
                },
            },
            "r < lower ? lower : (upper < r ? upper : r)": {"std::fmax(lower, std::fmin(upper, r))": {"cispo"}},
            # Surrogates where a field is NaN, or the advantage is 0
            "nan = nan_if(log_prob != log_prob)": {"A(0)": {"cispo", "log", "logits", "no clip", "ppo", "wide logits"}},
            "nan_if(fields.log_prob != fields.log_prob)": {"A(0)": {"cispo", "no clip", "ppo", "unknown"}},
            "product(advantage, -log_prob) + nan": {
                "product(advantage, -log_prob)": {"log", "logits", "wide logits"},
                "advantage * -log_prob + nan": {
                    "entropy",
                    "k3",
                    "log",
                    "logits",
                    "normal log",
                    "wide entropy",
                    "wide logits",
                },
            },
            "-advantage + nan": {"-advantage": ({"log", "wide logits"}, {"log"})},
            "weighted = product(advantage, clamped(r))": {"advantage * clamped(r)": {"cispo"}},
            "product(weighted, -log_prob) + nan": {
                "product(weighted, -log_prob)": {"cispo"},
                "weighted * -log_prob + nan": {"cispo"},
            },
            "-weighted + nan": {"-weighted": {"cispo"}},
            "plain = product(advantage, r)": {"advantage * r": {"no clip", "normal", "ppo"}},
            "advantage < A(0) && loss > most": {"advantage < A(0) && loss >= most": {"no clip"}},
            "(exceeds ? most : loss) + nan": {"exceeds ? most : loss": {"no clip", "ppo", "unknown"}},
            "(exceeds ? A(0) : slope) + nan": {"exceeds ? A(0) : slope": {"no clip", "ppo", "unknown"}},
            # The divergence from a reference policy
            "log_prob == none && fields.reference_log_prob == none": {"false": {"k3"}, "log_prob == none": {"k3"}},
            "std::abs(x) < A(1)": {"false": {"near"}, "true": {"k3", "ppo"}, "x < A(1)": {"k3", "ppo"}},
            "e == static_cast<A>(INFINITY) ? e : e - A(1) - x": {
                "e - A(1) - x": {"k3", "normal", "normal log"},
                "e - x": {"k3", "normal", "normal log"},
            },
            "is_small ? series : value": {"series": {"k3"}, "value": {"near"}},
            "is_small ? series + x : e - A(1)": {
                "series + x": {"k3", "ppo"},
                "is_small ? series + x : e": {"k3", "ppo"},
            },
            # approx_kl and clip_fraction
            "is_illegal && old_log_prob == old_log_prob ? A(0) : beyond.derivative + A(1)": {
                "beyond.derivative + A(1)": {"impossible", "normal", "ppo"},
                "is_illegal ? A(0) : beyond.derivative + A(1)": {"ppo", "unknown"},
            },
            "is_illegal ? infinity + nan_if(old_log_prob != old_log_prob) : beyond.value": {
                "beyond.value": {"impossible", "normal", "normal log"},
                "is_illegal ? infinity : beyond.value": {"unknown"},
            },
            "loss - product(entropy_weight, entropy)": {"loss - entropy_weight * entropy": {"infinite entropy"}},
            # Clipped values
            "clip == static_cast<A>(INFINITY)": {"false": {"value without clip"}},
            "error * error >= kept_error * kept_error": {
                "error * error > kept_error * kept_error": {"value", "value in place"}
            },
            "error * error + kept_error * kept_error": {
                "error * error": {"value", "value in place"},
                "kept_error * kept_error": {"value", "value in place"},
                "A(0)": {"value", "value in place"},
            },
            "(is_first ? error * error : kept_error * kept_error) + nan": {
                "is_first ? error * error : kept_error * kept_error": {"value", "value in place"},
            },
            "A(2) * (is_first ? error : (kept == change ? kept_error : A(0))) + nan": {
                "A(2) * (is_first ? error : (kept == change ? kept_error : A(0)))": {"value", "value in place"},
                "A(2) * (is_first ? error : A(0)) + nan": {"value"},
            },
        },
        "formulas/distributions.h": {
            "lost = others - (all - chosen_e)": {
                "A(0)": {"certain"},
                "others": {"entropy", "logits"},
                "all - chosen_e - others": {"certain"},
            },
            "chosen_e > others ? log_all + lost / all : log_all": {
                "log_all": {"certain"},
                "log_all - lost / all": {"certain"},
            },
            "(d < A(-3e38f) ? A(-3e38f) : d) - expected": {
                "d - expected": ({"wide entropy"}, {"entropy", "logits", "wide entropy", "wide logits"})
            },
            "product(slope, z * inverse_scale)": {"slope * (z * inverse_scale)": {"normal", "normal log"}},
            "product(slope, z * z - A(1)) - entropy_weight": {
                "slope * (z * z - A(1)) - entropy_weight": {"normal", "normal log"}
            },
        },
    },
}

CHOICE = f"""
#if defined(__CUDACC_RTC__)
__device__ __forceinline__ bool is_fault(int fault) {{
  unsigned long long chosen;
  asm("mov.u64 %0, {engines.MARKER};" : "=l"(chosen));
  return *reinterpret_cast<const int*>(chosen) == fault;
}}
#else
extern "C" {{
inline int chosen_fault = 0;
}}
inline bool is_fault(int fault) {{
  return chosen_fault == fault;
}}
#endif
"""
#: suite, file, right expression, users, wrong expression
NUMBERED = [
    (suite, file, right, users, wrong)
    for suite, files in FAULTS.items()
    for file, expressions in files.items()
    for right, wrongs in expressions.items()
    for wrong, users in wrongs.items()
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of csrc with all faults."""
    folder = tmp_path_factory.mktemp("faulty") / "csrc"
    shutil.copytree(ROOT / "csrc", folder)
    faults = collections.defaultdict(dict)
    for number, (_, file, right, *_, wrong) in enumerate(NUMBERED, 1):
        faults[file].setdefault(right, []).append(f"is_fault({number}) ? ({wrong}) : ")
    for file, rights in faults.items():
        text = (folder / file).read_text()
        assert all(text.count(right) == 1 for right in rights), f"csrc/{file} has changed: change its faults too"
        for right in sorted(rights, key=len, reverse=True):  # expressions before their parts
            before, expression = re.fullmatch(r"(.* [-+]?= |return )?(.*)", right).groups("")
            text = text.replace(right, f"{before}({''.join(rights[right])}({expression}))")
        (folder / file).write_text(text)
    port = folder / "formulas/port.h"
    port.write_text(port.read_text().replace("#pragma once\n", "#pragma once\n" + CHOICE))
    return folder


def check(processor: str, library: Path, sources: Path) -> None:
    """Each fault changes the results that FAULTS names, and no others."""
    script, suites = Path(__file__).with_name("engines.py"), [suite for suite, *_ in NUMBERED]
    command = [sys.executable, str(script), processor, str(library), str(sources), json.dumps(suites)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    without, *found = map(set, json.loads(done.stdout))
    assert without == set()
    other = "cuda" if processor == "cpu" else "cpu"
    expected, wrong = {}, {}
    for (suite, file, right, users, fault), changed in zip(NUMBERED, found, strict=True):
        name = f"{suite}, {file}: {right} -> {fault}"
        if file.startswith(f"loss/{other}"):
            expected[name] = set()
        elif isinstance(users, tuple):
            expected[name] = users[processor == "gpu"]
        else:
            expected[name] = users - (GPU if processor == "cpu" else CPU)
        wrong[name] = changed
    assert wrong == expected


def test_faults_of_the_cpu(sources, tmp_path):
    flags = ["-std=c++20", "-fopenmp-simd", "-w", "-DGRADSCALE_X86_VARIANTS=0", str(sources / "loss/cpu/samples.cpp")]
    check("cpu", compile_library(tmp_path / "kernels.so", sources / "loss/cpu/loss_rows.cpp", *flags), sources)


def test_faults_of_a_gpu(sources, driver):
    check("gpu", driver, sources)
