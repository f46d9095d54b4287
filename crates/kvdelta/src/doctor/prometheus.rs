// SPDX-License-Identifier: Apache-2.0

//! The samples of a Prometheus text.
//!
//! `prometheus-parse` knows no colon in a name, which every metric of vLLM has.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

/// One sample.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub(crate) name: String,
    labels: BTreeMap<String, String>,
    pub(crate) value: f64,
}

impl Sample {
    /// The value of a label.
    pub(crate) fn label(&self, name: &str) -> Option<&str> {
        self.labels.get(name).map(String::as_str)
    }

    /// `name{label="value",...} value [timestamp]`; `None` for anything else.
    fn parse(line: &str) -> Option<Self> {
        let end = line.find(|letter: char| !is_of_name(letter))?;
        let (name, mut rest) = line.split_at(end);
        if name.is_empty() || name.starts_with(|letter: char| letter.is_ascii_digit()) {
            return None;
        }
        let mut labels = BTreeMap::new();
        if let Some(inner) = rest.strip_prefix('{') {
            rest = inner.trim_start();
            while !rest.starts_with('}') {
                let (label, after) = rest.split_once('=')?;
                let (value, after) = quoted(after.trim_start())?;
                labels.insert(label.trim().to_owned(), value);
                rest = after.trim_start();
                rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
            }
            rest = &rest[1..];
        }
        Some(Self {
            name: name.to_owned(),
            labels,
            value: rest.split_whitespace().next()?.parse().ok()?,
        })
    }
}

fn is_of_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_' || letter == ':'
}

/// A text in quotes with its escapes undone, and what follows it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let text = text.strip_prefix('"')?;
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match letters.next()?.1 {
                'n' => value.push('\n'),
                escaped => value.push(escaped),
            },
            _ => value.push(letter),
        }
    }
    None
}

/// The samples of a text; lines that are none are passed over.
///
/// # Errors
/// There is no sample at all, as in a page of another kind of server.
pub(crate) fn parse(text: &str) -> Result<Vec<Sample>> {
    let samples: Vec<Sample> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.starts_with('#'))
        .filter_map(Sample::parse)
        .collect();
    if samples.is_empty() {
        let beginning: String = text.chars().take(40).collect();
        bail!("no metrics in the answer, which begins {beginning:?}");
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_every_shape_are_read() {
        let text = "# HELP a words\n\
            # TYPE a counter\n\
            a 1\n\
            vllm:b_total{} 2.5e3 1700000000\n\
            c{x=\"1\", y=\"quote \\\" brace } comma , back \\\\ line \\n end\",} +Inf\n\
            d{x=\"\"} NaN\n\
            <html>\n\
            e{x=\"1\n\
            9f 1\n\
            g{x} 1\n\
            h\n";
        let samples = parse(text).unwrap();
        let names: Vec<&str> = samples.iter().map(|sample| sample.name.as_str()).collect();
        assert_eq!(names, ["a", "vllm:b_total", "c", "d"]);
        assert_eq!(samples[1].value, 2500.0);
        assert_eq!(samples[2].label("x"), Some("1"));
        assert_eq!(
            samples[2].label("y"),
            Some("quote \" brace } comma , back \\ line \n end")
        );
        assert_eq!(samples[2].value, f64::INFINITY);
        assert!(samples[3].value.is_nan());
        assert_eq!(samples[3].label("none"), None);
    }

    #[test]
    fn a_text_without_samples_is_an_error_that_shows_it() {
        let error = parse("<html><p>hello</p></html>").unwrap_err().to_string();
        assert!(error.contains("<html>"), "{error}");
        assert!(parse("").is_err());
    }
}
