// SPDX-License-Identifier: Apache-2.0

//! Prompts from a file of token ids.

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// One value of a JSON file.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Value {
    One(Vec<u32>),
    Many(Vec<Vec<u32>>),
}

/// Reads prompts: JSON arrays of token ids, each a prompt, alone, one after the other or in an array; or ids
/// with blanks or commas between them, a prompt a line.
///
/// # Errors
/// Something else stands there, or nothing does.
pub(crate) fn parse(text: &str) -> Result<Vec<Vec<u32>>> {
    let prompts = if text.trim_start().starts_with('[') {
        json(text)?
    } else {
        let lines = text.lines().enumerate();
        lines
            .map(|(at, line)| plain(line).with_context(|| format!("line {}", at + 1)))
            .filter(|prompt| !prompt.as_ref().is_ok_and(Vec::is_empty))
            .collect::<Result<_>>()?
    };
    if prompts.is_empty() {
        bail!("no prompt in it");
    }
    Ok(prompts)
}

fn json(text: &str) -> Result<Vec<Vec<u32>>> {
    let mut prompts = Vec::new();
    let values = serde_json::Deserializer::from_str(text).into_iter();
    for value in values {
        let number = prompts.len() + 1;
        let not_ids = || {
            format!(
                "prompt {number} is no array of token ids (0 to {})",
                u32::MAX
            )
        };
        match value.with_context(not_ids)? {
            Value::One(prompt) => prompts.push(prompt),
            Value::Many(many) => prompts.extend(many),
        }
    }
    Ok(prompts)
}

fn plain(line: &str) -> Result<Vec<u32>> {
    let words = line.split(|letter: char| letter.is_whitespace() || letter == ',');
    let words = words.filter(|word| !word.is_empty());
    words
        .map(|word| {
            word.parse()
                .ok()
                .with_context(|| format!("{word:?} is no token id (0 to {})", u32::MAX))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_gives_the_same_prompts() {
        let expected = vec![vec![1, 2, 3], vec![4]];
        for text in [
            "1 2 3\n4\n",
            "1,2, 3\n\n  4",
            "[[1, 2, 3], [4]]",
            "[1, 2, 3]\n[4]\n",
            "[1,2,\n3] [[4]]",
        ] {
            assert_eq!(parse(text).unwrap(), expected, "{text}");
        }
        assert_eq!(parse("[]").unwrap(), [Vec::<u32>::new()]);
    }

    #[test]
    fn what_is_no_token_id_is_named() {
        for (text, reason) in [
            ("", "no prompt"),
            ("\n \n", "no prompt"),
            ("1 2\n3 x", "line 2: \"x\" is no token id"),
            ("4294967296", "line 1: \"4294967296\" is no token id"),
            ("1 -2", "\"-2\" is no token id"),
            ("[1, 2]\n[\"a\"]", "prompt 2 is no array of token ids"),
            ("[1, 2", "prompt 1 is no array of token ids"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
