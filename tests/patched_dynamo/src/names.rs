// SPDX-License-Identifier: Apache-2.0

//! Names in place of what differs between two runs: ids, addresses, paths, times.

use std::collections::HashMap;

use serde_json::Value;

/// Names given so far.
#[derive(Debug, Default)]
pub(crate) struct Names {
    texts: HashMap<String, String>,
    numbers: HashMap<u64, String>,
}

impl Names {
    /// From now on the text `id` is called `name`, also inside of a longer text.
    pub(crate) fn text(&mut self, id: impl Into<String>, name: impl Into<String>) {
        let id = id.into();
        if !id.is_empty() {
            self.texts.insert(id, name.into());
        }
    }

    /// From now on the number `id` is called `name`, also as decimal or hexadecimal text.
    pub(crate) fn number(&mut self, id: u64, name: &str) {
        self.numbers.insert(id, name.to_owned());
        self.text(id.to_string(), name);
        self.text(format!("{id:x}"), name);
    }

    /// The name of a number, if it has one.
    pub(crate) fn of(&self, id: u64) -> Option<&str> {
        self.numbers.get(&id).map(String::as_str)
    }

    /// `text` with names in place of ids, the longer ids first.
    pub(crate) fn in_text(&self, text: &str) -> String {
        let mut ids: Vec<_> = self.texts.iter().collect();
        ids.sort_by_key(|(id, _)| (std::cmp::Reverse(id.len()), *id));
        let mut named = text.to_owned();
        for (id, name) in ids {
            if named.contains(id.as_str()) {
                named = named.replace(id.as_str(), &format!("<{name}>"));
            }
        }
        named
    }

    /// `value` with names in place of ids, wherever they stand in it. A field of `times` (of any
    /// object) keeps its presence and loses its value.
    pub(crate) fn in_value(&self, value: &Value, times: &[&str]) -> Value {
        match value {
            Value::Number(number) => match number.as_u64().and_then(|id| self.of(id)) {
                Some(name) => format!("<{name}>").into(),
                None => value.clone(),
            },
            Value::String(text) => self.in_text(text).into(),
            Value::Array(items) => items
                .iter()
                .map(|item| self.in_value(item, times))
                .collect(),
            Value::Object(fields) => fields
                .iter()
                .map(|(key, item)| {
                    let item = if times.contains(&key.as_str()) && !item.is_null() {
                        "<varies>".into()
                    } else {
                        self.in_value(item, times)
                    };
                    (self.in_text(key), item)
                })
                .collect(),
            other => other.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ids_are_named_in_numbers_texts_and_keys_and_nothing_else_changes() {
        let mut names = Names::default();
        names.number(0xabcdef01, "decode 0");
        names.text("/tmp/model", "model");
        names.text("/tmp", "wrong");
        let value = json!({
            "worker": 0xabcdef01_u64,
            "path": "/tmp/model/config.json",
            "2882400001": ["abcdef01", 7, 1.5, null, true],
            "created": 1_700_000_000,
            "nothing": {"created": null},
        });
        assert_eq!(
            names.in_value(&value, &["created"]),
            json!({
                "worker": "<decode 0>",
                "path": "<model>/config.json",
                "<decode 0>": ["<decode 0>", 7, 1.5, null, true],
                "created": "<varies>",
                "nothing": {"created": null},
            })
        );
    }

    #[test]
    fn values_that_differ_stay_different() {
        let mut names = Names::default();
        names.number(5, "prefill 0");
        names.number(6, "prefill 1");
        let named = |id: u64| names.in_value(&json!({ "worker": id }), &[]);
        assert_ne!(named(5), named(6));
        assert_ne!(named(5), named(7));
    }
}
