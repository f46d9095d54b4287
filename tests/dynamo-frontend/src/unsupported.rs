// SPDX-License-Identifier: Apache-2.0

//! Options of `python -m dynamo.frontend` that need Python, or that another program serves.
//!
//! On the command line they are refused by name. In the environment, which is shared with other
//! programs, they give a warning if the value asks for something that this program then lacks.

use std::ffi::OsString;

#[cfg(test)]
mod tests;

/// One option that is refused.
struct Unsupported {
    flag: &'static str,
    /// Its variable, if the variable alone would change what Python's frontend does.
    variable: Option<&'static str>,
    /// The value of that variable that asks for nothing.
    idle: &'static str,
}

const fn flag(flag: &'static str) -> Unsupported {
    Unsupported {
        flag,
        variable: None,
        idle: "",
    }
}

const fn with_variable(
    flag: &'static str,
    variable: &'static str,
    idle: &'static str,
) -> Unsupported {
    Unsupported {
        flag,
        variable: Some(variable),
        idle,
    }
}

/// The last four have an effect only beside `--dyn-chat-processor`.
const UNSUPPORTED: [Unsupported; 10] = [
    flag("-i"),
    with_variable("--interactive", "DYN_INTERACTIVE", "false"),
    with_variable("--dump-config-to", "DYN_DUMP_CONFIG_TO", ""),
    with_variable(
        "--frontend-route-extension",
        "DYN_FRONTEND_ROUTE_EXTENSIONS",
        "",
    ),
    with_variable("--dyn-chat-processor", "DYN_CHAT_PROCESSOR", "dynamo"),
    with_variable("--ais-perf-config", "DYN_AIS_PERF_CONFIG", ""),
    flag("--dyn-debug-perf"),
    flag("--dyn-preprocess-workers"),
    flag("--trust-remote-code"),
    flag("--exclude-tools-when-tool-choice-none"),
];

/// AISimulate is a Python package; its flags come under a new and an old prefix.
const AISIMULATE_PREFIXES: [&str; 2] = ["--ais-", "--aic-"];

/// A variable of `python -m dynamo.frontend` without an option, and what to do instead.
const JEMALLOC: (&str, &str) = (
    "DYN_FRONTEND_JEMALLOC",
    "start this binary with LD_PRELOAD=libjemalloc.so.2",
);

/// The line that refuses `name`, if it is an option of Python's frontend that is not here.
pub(crate) fn refusal(name: &str) -> Option<String> {
    let positive = match name.strip_prefix("--no-") {
        Some(rest) => format!("--{rest}"),
        None => name.to_owned(),
    };
    let known = UNSUPPORTED.iter().any(|option| option.flag == positive)
        || AISIMULATE_PREFIXES
            .iter()
            .any(|prefix| name.starts_with(prefix));
    known.then(|| {
        format!(
            "{name} is an option of Dynamo's Python frontend that this binary does not support; \
             see docs/frontend.md"
        )
    })
}

/// One warning for each variable that asks for what is not here.
pub(crate) fn warnings(variable: impl Fn(&str) -> Option<OsString>) -> Vec<String> {
    let (name, instead) = JEMALLOC;
    let jemalloc = variable(name)
        .filter(|value| !asks_for_nothing(&value.to_string_lossy(), "false"))
        .map(|value| format!("{name}={value:?} is ignored: {instead}"));
    UNSUPPORTED
        .iter()
        .filter_map(|option| {
            let name = option.variable?;
            let value = variable(name)?;
            if asks_for_nothing(&value.to_string_lossy(), option.idle) {
                return None;
            }
            Some(format!(
                "{name}={value:?} is ignored: {} is an option of Dynamo's Python frontend that \
                 this binary does not support",
                option.flag
            ))
        })
        .chain(jemalloc)
        .collect()
}

/// For a switch, Python's frontend takes every word but these four for "off".
fn asks_for_nothing(value: &str, idle: &str) -> bool {
    let value = value.trim().to_ascii_lowercase();
    if idle == "false" {
        return !["1", "true", "on", "yes"].contains(&value.as_str());
    }
    value.is_empty() || value == idle
}
