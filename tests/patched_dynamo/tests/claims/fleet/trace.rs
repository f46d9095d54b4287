// SPDX-License-Identifier: Apache-2.0

//! What the frontends of one test trace: spans by name, and the router's log lines.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// Where log lines are kept from.
const TARGETS: [&str; 5] = [
    "dynamo_llm::kv_router",
    "dynamo_llm::migration",
    "dynamo_kv_router",
    "dynamo_custom_policy",
    "kvdelta",
];
/// Log lines that a failed test shows.
const TAIL: usize = 20;

/// Spans and log lines so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trace(Arc<Mutex<Seen>>);

#[derive(Debug, Default)]
struct Seen {
    spans: BTreeMap<&'static str, usize>,
    lines: Vec<Line>,
}

/// A log line.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    target: String,
    /// Its fields; the text is `message`.
    fields: BTreeMap<&'static str, String>,
}

impl Line {
    /// The text without the fields.
    pub(crate) fn message(&self) -> &str {
        self.field("message")
    }

    /// A field as text; empty if it has none of the name.
    pub(crate) fn field(&self, name: &str) -> &str {
        self.fields.get(name).map_or("", String::as_str)
    }
}

impl fmt::Display for Line {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.target, self.message())?;
        for (name, value) in &self.fields {
            if *name != "message" {
                write!(formatter, " {name}={value}")?;
            }
        }
        Ok(())
    }
}

impl Trace {
    /// How many spans of this name began.
    pub(crate) fn spans(&self, name: &str) -> usize {
        self.seen().spans.get(name).copied().unwrap_or_default()
    }

    /// The log lines whose text has `part` in it, oldest first.
    pub(crate) fn lines(&self, part: &str) -> Vec<Line> {
        let seen = self.seen();
        let lines = seen.lines.iter();
        lines
            .filter(|line| line.message().contains(part))
            .cloned()
            .collect()
    }

    /// The last log lines, for the report of a failure.
    pub(crate) fn tail(&self) -> String {
        let seen = self.seen();
        let from = seen.lines.len().saturating_sub(TAIL);
        let lines = seen.lines[from..].iter();
        lines.map(|line| format!("  | {line}\n")).collect()
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

impl<S: tracing::Subscriber> Layer<S> for Trace {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        let name = attributes.metadata().name();
        *self.seen().spans.entry(name).or_default() += 1;
    }

    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let target = event.metadata().target();
        if !TARGETS.iter().any(|kept| target.starts_with(kept)) {
            return;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        self.seen().lines.push(Line {
            target: target.to_owned(),
            fields: fields.0,
        });
    }
}
