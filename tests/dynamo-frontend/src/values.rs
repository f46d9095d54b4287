// SPDX-License-Identifier: Apache-2.0

//! Readers of single values. Each error tells the rule; the caller adds the name and the value.

use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use dynamo_kv_router::{ConditionalDisaggPolicyKind, config::KvRouterConfig};
use serde::Deserialize;

#[cfg(test)]
mod tests;

/// A value that Dynamo lets one write as `None` (or leave empty) to mean "not set".
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Nullable<T>(pub(crate) Option<T>);

/// A whole number from `min` to `max`.
pub(crate) fn whole<T: FromStr + PartialOrd + Display>(
    text: &str,
    min: T,
    max: T,
) -> Result<T, String> {
    match text.parse::<T>() {
        Ok(value) if min <= value && value <= max => Ok(value),
        _ => Err(format!("must be a whole number from {min} to {max}")),
    }
}

/// A finite number, 0 or more.
pub(crate) fn non_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("must be a finite number, 0 or more".to_owned()),
    }
}

/// A number from 0 to 1.
pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("must be a number from 0 to 1".to_owned()),
    }
}

/// Seconds that fit a [`Duration`]; Dynamo converts them later and would panic.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if Duration::try_from_secs_f64(value).is_ok() => Ok(value),
        _ => Err("must be a number of seconds, 0 or more".to_owned()),
    }
}

/// `read`, or "not set" for `None` and the empty text, as Dynamo's Python frontend has it.
pub(crate) fn nullable<T>(
    text: &str,
    read: impl FnOnce(&str) -> Result<T, String>,
) -> Result<Nullable<T>, String> {
    if text.is_empty() || text == "None" {
        return Ok(Nullable(None));
    }
    match read(text) {
        Ok(value) => Ok(Nullable(Some(value))),
        Err(rule) => Err(format!("{rule}, or None")),
    }
}

/// A switch in the environment. Dynamo's own words; a word of no meaning is refused, where
/// Python's frontend takes it for "off".
pub(crate) fn switch(text: &str) -> Result<bool, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" => Ok(true),
        "" | "0" | "false" | "off" | "no" => Ok(false),
        _ => Err("must be one of true, 1, on, yes, false, 0, off, no".to_owned()),
    }
}

/// A name that is not blank, trimmed.
pub(crate) fn name(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("must not be blank".to_owned()),
        trimmed => Ok(trimmed.to_owned()),
    }
}

/// The JSON object of `--router-conditional-disagg-config`; what it leaves out is Dynamo's default.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ConditionalDisagg {
    /// Which bypass policy runs.
    pub(crate) policy: ConditionalDisaggPolicyKind,
    /// Cutoff in tokens.
    pub(crate) eff_isl_threshold: usize,
    /// Cutoff as a fraction of the prompt.
    pub(crate) eff_isl_ratio_threshold: f64,
    /// Fraction at which the prefill worker counts as busy.
    pub(crate) prefill_busy_threshold: Option<f64>,
    /// Fraction at which the decode worker counts as busy.
    pub(crate) decode_busy_threshold: Option<f64>,
}

impl Default for ConditionalDisagg {
    fn default() -> Self {
        let dynamo = KvRouterConfig::default();
        Self {
            policy: dynamo.conditional_disagg_policy,
            eff_isl_threshold: dynamo.conditional_disagg_eff_isl_threshold,
            eff_isl_ratio_threshold: dynamo.conditional_disagg_eff_isl_ratio_threshold,
            prefill_busy_threshold: None,
            decode_busy_threshold: None,
        }
    }
}

/// Reads a [`ConditionalDisagg`] and checks its ranges.
pub(crate) fn conditional_disagg(text: &str) -> Result<ConditionalDisagg, String> {
    if !text.trim_start().starts_with('{') {
        return Err("must be a JSON object".to_owned());
    }
    let read: ConditionalDisagg =
        serde_json::from_str(text).map_err(|error| format!("must be a JSON object ({error})"))?;
    if !(0.0..=1.0).contains(&read.eff_isl_ratio_threshold) {
        return Err("must have an eff_isl_ratio_threshold from 0 to 1".to_owned());
    }
    for (field, value) in [
        ("prefill_busy_threshold", read.prefill_busy_threshold),
        ("decode_busy_threshold", read.decode_busy_threshold),
    ] {
        if value.is_some_and(|value| value < 0.0) {
            return Err(format!("must have a {field} of 0 or more"));
        }
    }
    Ok(read)
}
