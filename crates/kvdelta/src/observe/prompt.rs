// SPDX-License-Identifier: Apache-2.0

//! Prompts from a file of token ids.

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

/// Reads prompts: JSON arrays of token ids, each a prompt, alone, one after the other or in an array; or ids
/// with blanks or commas between them, a prompt a line.
///
/// # Errors
/// Something else stands there, or nothing does, or a prompt is empty.
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
    for value in serde_json::Deserializer::from_str(text).into_iter() {
        let value: Value = value.map_err(|error| not_json(&error))?;
        match value {
            Value::Array(many) if many.first().is_some_and(Value::is_array) => {
                for one in &many {
                    prompts.push(ids(prompts.len() + 1, one)?);
                }
            }
            one => prompts.push(ids(prompts.len() + 1, &one)?),
        }
    }
    Ok(prompts)
}

fn ids(number: usize, value: &Value) -> Result<Vec<u32>> {
    let items = value
        .as_array()
        .with_context(|| format!("prompt {number}: {value} is no array of token ids"))?;
    if items.is_empty() {
        bail!("prompt {number} is empty");
    }
    let items = items.iter();
    items
        .map(|item| {
            let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
            id.with_context(|| {
                format!("prompt {number}: {item} is no token id (0 to {})", u32::MAX)
            })
        })
        .collect()
}

/// The parser's words are about its own types; where it stopped is what helps.
fn not_json(error: &serde_json::Error) -> anyhow::Error {
    match error.is_eof() {
        true => anyhow!("it ends within an array"),
        false => anyhow!(
            "no JSON at line {}, column {}",
            error.line(),
            error.column()
        ),
    }
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
    }

    #[test]
    fn what_is_no_token_id_is_named() {
        for (text, reason) in [
            ("", "no prompt"),
            ("\n \n", "no prompt"),
            ("1 2\n3 x", "line 2: \"x\" is no token id"),
            ("4294967296", "line 1: \"4294967296\" is no token id"),
            ("1 -2", "\"-2\" is no token id"),
            ("[1, -2]", "prompt 1: -2 is no token id (0 to 4294967295)"),
            ("[1, 2]\n[\"a\"]", "prompt 2: \"a\" is no token id"),
            (
                "[[1], [2, 4294967296]]",
                "prompt 2: 4294967296 is no token id",
            ),
            ("[[1], [2]] [[3], [4.5]]", "prompt 4: 4.5 is no token id"),
            ("[[1], 2]", "prompt 2: 2 is no array of token ids"),
            ("[1] {}", "prompt 2: {} is no array of token ids"),
            ("[1, [2]]", "prompt 1: [2] is no token id"),
            ("[]", "prompt 1 is empty"),
            ("[[1], []]", "prompt 2 is empty"),
            ("[1, 2", "it ends within an array"),
            ("[1,\n 2 3]", "no JSON at line 2, column 4"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
