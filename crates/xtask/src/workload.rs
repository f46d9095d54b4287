// SPDX-License-Identifier: Apache-2.0

//! The requests of the main job, and what their KV would cost to move. Pure.
//!
//! Two workloads: prefixes that several requests share, and conversations whose prompts contain
//! the earlier answers. Prompts are token ids of the test model, whose tokenizer maps one word to
//! one token (`tests/engines/make_model.py`).

use std::collections::{HashMap, HashSet};
use std::fmt;

/// First token id that is not special in the test model.
pub(crate) const FIRST_WORD: u32 = 4;

/// The size of everything, and the seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Distinct prefixes, and conversations.
    pub(crate) prefixes: usize,
    /// Requests that share each prefix.
    pub(crate) requests_per_prefix: usize,
    /// Length of a prefix, and of the document that opens a conversation.
    pub(crate) prefix_tokens: usize,
    /// New tokens of each request, and of each turn.
    pub(crate) new_tokens: usize,
    /// Turns of each conversation; 0 leaves conversations out.
    pub(crate) turns: usize,
    /// Tokens of each answer.
    pub(crate) output_tokens: usize,
    /// Seed of all token ids.
    pub(crate) seed: u64,
}

impl Shape {
    /// Requests of both workloads.
    pub(crate) fn requests(&self) -> usize {
        self.prefixes * (self.requests_per_prefix + self.turns)
    }

    /// The longest prompt with its answer.
    pub(crate) fn longest_tokens(&self) -> usize {
        let turn_tokens = self.new_tokens + self.output_tokens;
        self.prefix_tokens + turn_tokens * self.turns.max(1)
    }
}

/// Which of the two workloads a request belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Workload {
    /// Several requests share a prefix.
    SharedPrefixes,
    /// Each prompt contains the conversation so far, answers included.
    Conversation,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SharedPrefixes => "shared prefixes",
            Self::Conversation => "conversation",
        })
    }
}

/// A request before the answers that its prompt contains are known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Planned {
    /// The workload.
    pub(crate) workload: Workload,
    /// Requests of one lane follow each other; lanes are independent.
    pub(crate) lane: usize,
    /// The request whose prompt and answer stand before `tokens` in the prompt.
    pub(crate) after: Option<usize>,
    /// The part of the prompt that is new in this plan.
    pub(crate) tokens: Vec<u32>,
}

/// All requests in the order in which they are sent: prefixes and conversations take turns.
pub(crate) fn plan(shape: &Shape, vocabulary: u32) -> Vec<Planned> {
    let mut random = fastrand::Rng::with_seed(shape.seed);
    let mut draw = |count: usize| -> Vec<u32> {
        (0..count)
            .map(|_| random.u32(FIRST_WORD..vocabulary))
            .collect()
    };
    let mut requests = Vec::new();
    let mut lane = 0;
    let prefixes: Vec<Vec<u32>> = (0..shape.prefixes)
        .map(|_| draw(shape.prefix_tokens))
        .collect();
    for _ in 0..shape.requests_per_prefix {
        for prefix in &prefixes {
            let mut tokens = prefix.clone();
            tokens.extend(draw(shape.new_tokens));
            requests.push(Planned {
                workload: Workload::SharedPrefixes,
                lane,
                after: None,
                tokens,
            });
            lane += 1;
        }
    }
    let mut last: Vec<Option<usize>> = vec![None; shape.prefixes];
    for _ in 0..shape.turns {
        for (conversation, last) in last.iter_mut().enumerate() {
            let opening_tokens = if last.is_none() {
                shape.prefix_tokens
            } else {
                0
            };
            requests.push(Planned {
                workload: Workload::Conversation,
                lane: lane + conversation,
                after: *last,
                tokens: draw(opening_tokens + shape.new_tokens),
            });
            *last = Some(requests.len() - 1);
        }
    }
    requests
}

/// The prompt of request `index`, given the prompts and answers of the requests before it.
pub(crate) fn prompt(plan: &[Planned], index: usize, before: &[(Vec<u32>, Vec<u32>)]) -> Vec<u32> {
    let planned = &plan[index];
    let mut tokens = Vec::new();
    if let Some(after) = planned.after {
        let (prompt, answer) = &before[after];
        tokens.extend_from_slice(prompt);
        tokens.extend_from_slice(answer);
    }
    tokens.extend_from_slice(&planned.tokens);
    tokens
}

/// A trace in Mooncake's format of `requests`, prompts with their answers' lengths, `gap_ms` apart: one line each,
/// and one id for every block of a prompt, equal where that block and all before it are.
pub(crate) fn trace(requests: &[(&[u32], usize)], block_size: usize, gap_ms: usize) -> String {
    let mut ids: HashMap<&[u32], usize> = HashMap::new();
    let mut lines = String::new();
    for (index, (prompt, output_tokens)) in requests.iter().enumerate() {
        let ends = (1..=prompt.len().div_ceil(block_size)).map(|block| block * block_size);
        let hash_ids: Vec<usize> = ends
            .map(|end| {
                let next = ids.len();
                *ids.entry(&prompt[..end.min(prompt.len())]).or_insert(next)
            })
            .collect();
        let line = serde_json::json!({
            "timestamp": index * gap_ms,
            "input_length": prompt.len(),
            "output_length": output_tokens,
            "hash_ids": hash_ids,
        });
        lines.push_str(&format!("{line}\n"));
    }
    lines
}

/// Blocks that prompts of these lengths fill, the last of each perhaps in part.
pub(crate) fn full_transfer_blocks(prompts: &[&[u32]], block_size: usize) -> u64 {
    let blocks = prompts
        .iter()
        .map(|prompt| prompt.len().div_ceil(block_size));
    blocks.map(|blocks| blocks as u64).sum()
}

/// Blocks that travel when decode has one common cache without end, requests one at a time: each
/// prefix once. `requests` are prompts with their answers, in order.
///
/// As in vLLM a hit ends before the prompt's last token, and the KV of an answer's last token is
/// never computed.
pub(crate) fn once_blocks(requests: &[(&[u32], &[u32])], block_size: usize) -> u64 {
    let mut cached: HashSet<Vec<u32>> = HashSet::new();
    let mut moved = 0;
    for (prompt, answer) in requests {
        let hit_limit = prompt.len().saturating_sub(1) / block_size;
        let hit = (1..=hit_limit)
            .take_while(|blocks| cached.contains(&prompt[..blocks * block_size]))
            .count();
        moved += (prompt.len().div_ceil(block_size) - hit) as u64;
        let mut computed = [*prompt, *answer].concat();
        computed.truncate((prompt.len() + answer.len()).saturating_sub(1));
        for blocks in 1..=computed.len() / block_size {
            cached.insert(computed[..blocks * block_size].to_vec());
        }
    }
    moved
}

/// The text whose tokens are `tokens`.
pub(crate) fn text(tokens: &[u32]) -> String {
    let words: Vec<String> = tokens.iter().map(|token| format!("w{token:04}")).collect();
    words.join(" ")
}

/// The tokens of a text of the test model, or the word that is none.
pub(crate) fn tokens(text: &str) -> Result<Vec<u32>, String> {
    text.split_whitespace()
        .map(|word| {
            word.strip_prefix('w')
                .filter(|digits| digits.len() == 4)
                .and_then(|digits| digits.parse().ok())
                .ok_or_else(|| format!("{word:?} is not a word of the test model"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        prefixes: 4,
        requests_per_prefix: 8,
        prefix_tokens: 2048,
        new_tokens: 100,
        turns: 3,
        output_tokens: 16,
        seed: 1,
    };

    #[test]
    fn the_same_seed_gives_the_same_requests() {
        assert_eq!(plan(&SHAPE, 4096), plan(&SHAPE, 4096));
        assert_ne!(plan(&SHAPE, 4096), plan(&Shape { seed: 2, ..SHAPE }, 4096));
    }

    #[test]
    fn requests_of_a_prefix_share_it_and_nothing_else() {
        let plan = plan(&SHAPE, 4096);
        assert_eq!(plan.len(), 4 * 8 + 4 * 3);
        let (first, same, other) = (&plan[0].tokens, &plan[4].tokens, &plan[1].tokens);
        assert_eq!(first.len(), 2148);
        assert_eq!(first[..2048], same[..2048]);
        assert_ne!(first[2048..], same[2048..]);
        assert_ne!(first[..32], other[..32]);
    }

    #[test]
    fn a_turn_contains_the_earlier_turns_and_answers() {
        let plan = plan(&SHAPE, 4096);
        let first = 32;
        let second = 36;
        assert_eq!(plan[second].after, Some(first));
        assert_eq!(plan[second].lane, plan[first].lane);
        let mut before = vec![(Vec::new(), Vec::new()); plan.len()];
        before[first] = (plan[first].tokens.clone(), vec![7; 16]);
        let prompt = prompt(&plan, second, &before);
        assert_eq!(prompt.len(), 2148 + 16 + 100);
        assert_eq!(prompt[2148..2164], [7; 16]);
    }

    #[test]
    fn blocks_of_the_measured_workloads() {
        // The figures for 4 x 8 and 8 x 4 requests with blocks of 32 tokens and 131,072 bytes.
        for (prefixes, requests_per_prefix, once_bytes) in [(4, 8, 50_331_648), (8, 4, 83_886_080)]
        {
            let plan = plan(
                &Shape {
                    prefixes,
                    requests_per_prefix,
                    turns: 0,
                    ..SHAPE
                },
                4096,
            );
            let answer = [9; 16];
            let requests: Vec<(&[u32], &[u32])> = plan
                .iter()
                .map(|request| (request.tokens.as_slice(), answer.as_slice()))
                .collect();
            let prompts: Vec<&[u32]> = requests.iter().map(|request| request.0).collect();
            assert_eq!(once_blocks(&requests, 32) * 131_072, once_bytes);
            assert_eq!(full_transfer_blocks(&prompts, 32), 32 * 68);
        }
    }

    #[test]
    fn a_full_hit_leaves_the_block_of_the_last_token() {
        let prompt: &[u32] = &[5; 64];
        assert_eq!(once_blocks(&[(prompt, &[6]), (prompt, &[6])], 32), 2 + 1);
    }

    #[test]
    fn an_answer_is_cached_but_for_its_last_token() {
        let first: &[u32] = &[5; 32];
        let second: Vec<u32> = [[5; 32], [6; 32], [7; 32]].concat();
        assert_eq!(
            once_blocks(&[(first, &[6; 32]), (&second, &[8])], 32),
            1 + 2
        );
        assert_eq!(
            once_blocks(&[(first, &[6; 33]), (&second, &[8])], 32),
            1 + 1
        );
    }

    #[test]
    fn text_and_tokens_are_inverse() {
        let ids = [4, 17, 4095];
        assert_eq!(tokens(&text(&ids)).unwrap(), ids);
        assert!(tokens("w0004 <unk>").unwrap_err().contains("<unk>"));
    }

    #[test]
    fn a_trace_has_one_id_for_equal_prefixes() {
        let lines = trace(
            &[(&[4, 5, 6], 2), (&[4, 5, 7, 8], 1), (&[9, 5, 6], 2)],
            2,
            10,
        );
        let lines: Vec<&str> = lines.lines().collect();
        let expected = [
            r#"{"hash_ids":[0,1],"input_length":3,"output_length":2,"timestamp":0}"#,
            r#"{"hash_ids":[0,2],"input_length":4,"output_length":1,"timestamp":10}"#,
            r#"{"hash_ids":[3,4],"input_length":3,"output_length":2,"timestamp":20}"#,
        ];
        assert_eq!(lines, expected);
    }
}
