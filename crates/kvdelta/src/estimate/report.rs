// SPDX-License-Identifier: Apache-2.0

//! The answer: bytes, memory and times of one request on one layout.

use serde::Serialize;

use super::model::{Cache, Layers, ModelError, Shape};
use super::transfer::{Link, Request, Sizes, delta_wins, equal_gbit_per_second};
use super::work::Speed;

/// Version of the JSON's keys.
const VERSION: u32 = 1;

/// How P and D are split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) prefill_tp: u64,
    pub(crate) decode_tp: u64,
    /// Ranks of a worker that each have requests of their own, of the TP above.
    pub(crate) dp: u64,
}

/// How fast D computes.
#[derive(Debug)]
pub(crate) struct Compute {
    pub(crate) speed: Speed,
    /// The same in words.
    pub(crate) by: String,
    /// Where a device's peaks are from.
    pub(crate) source: Option<&'static str>,
}

/// What is asked.
#[derive(Debug)]
pub(crate) struct Question {
    /// What the model is called.
    pub(crate) model: String,
    pub(crate) shape: Shape,
    pub(crate) layout: Layout,
    pub(crate) request: Request,
    pub(crate) cached_tokens: u64,
    pub(crate) links: Vec<Link>,
    pub(crate) compute: Option<Compute>,
    pub(crate) warnings: Vec<String>,
}

/// The answer, as `--json` prints it.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    version: u32,
    pub(crate) model: ModelLine,
    pub(crate) layout: LayoutLine,
    pub(crate) request: RequestLine,
    pub(crate) transfer: TransferLine,
    pub(crate) prefill_memory: MemoryLine,
    pub(crate) recompute: Option<RecomputeLine>,
    pub(crate) links: Vec<LinkLine>,
    pub(crate) warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ModelLine {
    pub(crate) name: String,
    pub(crate) cache: Cache,
    pub(crate) layers: Vec<Layers>,
    pub(crate) dtype: &'static str,
    /// Each value once, windows not regarded.
    pub(crate) token_bytes: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct LayoutLine {
    pub(crate) prefill: RanksLine,
    pub(crate) decode: RanksLine,
    pub(crate) dp: u64,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct RanksLine {
    pub(crate) tp: u64,
    /// Ranks that hold the same bytes.
    pub(crate) copies: u64,
    pub(crate) token_bytes_a_rank: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct RequestLine {
    pub(crate) prompt_tokens: u64,
    pub(crate) block_size_tokens: u64,
    pub(crate) prompt_blocks: u64,
    /// As given; what counts of it is the overlap.
    pub(crate) cached_tokens: u64,
    pub(crate) overlap_blocks: u64,
    pub(crate) overlap_tokens: u64,
    pub(crate) delta_blocks: u64,
    pub(crate) missing_tokens: u64,
}

/// What D reads.
#[derive(Debug, Serialize)]
pub(crate) struct TransferLine {
    pub(crate) full_bytes: u64,
    pub(crate) full_bytes_a_rank: u64,
    pub(crate) delta_bytes: u64,
    pub(crate) delta_bytes_a_rank: u64,
    pub(crate) saved_bytes: u64,
    pub(crate) saved_share: f64,
}

/// What P holds from the end of prefill until D has read.
#[derive(Debug, Serialize)]
pub(crate) struct MemoryLine {
    pub(crate) held_bytes: u64,
    pub(crate) held_bytes_a_rank: u64,
    pub(crate) early_release_bytes: u64,
    pub(crate) early_release_bytes_a_rank: u64,
}

/// D computing what it lacks.
#[derive(Debug, Serialize)]
pub(crate) struct RecomputeLine {
    pub(crate) by: String,
    pub(crate) source: Option<&'static str>,
    pub(crate) seconds: f64,
    /// `None` where a rate was given.
    pub(crate) matrix_flops: Option<f64>,
    pub(crate) attention_flops: Option<f64>,
    /// The link on which the delta takes as long; `None`: the overhead alone takes longer.
    pub(crate) equal_gbit_per_second: Option<f64>,
}

#[derive(Debug, Serialize)]
pub(crate) struct LinkLine {
    pub(crate) gbit_per_second: f64,
    pub(crate) full_seconds: f64,
    pub(crate) delta_seconds: f64,
    pub(crate) saved_seconds: f64,
    pub(crate) faster: Option<Faster>,
    /// First and last number of cached tokens with which the delta is there before D could have
    /// computed it, in whole blocks.
    pub(crate) delta_faster_cached_tokens: Option<Vec<(u64, u64)>>,
}

/// The faster way to what D lacks, once P has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Faster {
    Transfer,
    Recompute,
}

impl Report {
    /// Fails where the layout does not fit the shape.
    pub(crate) fn new(question: Question) -> Result<Self, ModelError> {
        let Question {
            model,
            shape,
            layout,
            request,
            cached_tokens,
            links,
            compute,
            warnings,
        } = question;
        let tp = layout.decode_tp;
        let rank = Sizes::a_rank(&shape, tp, &request)?;
        let all = Sizes::in_all(&shape, tp, &request)?;
        let recompute = compute.as_ref().map(|compute| {
            let overhead = links.first().map_or(0.0, |link| link.overhead_seconds);
            RecomputeLine::new(compute, &request, all.delta_bytes, overhead)
        });
        let line = |link: &Link| -> Result<LinkLine, ModelError> {
            let full_seconds = link.seconds(all.full_bytes);
            let delta_seconds = link.seconds(all.delta_bytes);
            let wins = compute.as_ref().map(|compute| {
                let wins = delta_wins(&shape, tp, &request, link, &compute.speed)?;
                Ok(wins.iter().map(|of| (*of.start(), *of.end())).collect())
            });
            let wins: Option<Result<_, ModelError>> = wins;
            Ok(LinkLine {
                gbit_per_second: link.gbit_per_second,
                full_seconds,
                delta_seconds,
                saved_seconds: full_seconds - delta_seconds,
                faster: recompute.as_ref().map(|recompute| {
                    if delta_seconds < recompute.seconds {
                        Faster::Transfer
                    } else {
                        Faster::Recompute
                    }
                }),
                delta_faster_cached_tokens: wins.transpose()?,
            })
        };
        let links = links.iter().map(line).collect::<Result<_, _>>()?;
        let saved_bytes = all.full_bytes - all.delta_bytes;
        Ok(Self {
            version: VERSION,
            layout: LayoutLine {
                prefill: RanksLine::new(&shape, layout.prefill_tp)?,
                decode: RanksLine::new(&shape, tp)?,
                dp: layout.dp,
            },
            request: RequestLine {
                prompt_tokens: request.prompt_tokens(),
                block_size_tokens: request.block_tokens(),
                prompt_blocks: request.prompt_blocks(),
                cached_tokens,
                overlap_blocks: request.overlap_blocks(),
                overlap_tokens: request.overlap_tokens(),
                delta_blocks: request.delta_blocks(),
                missing_tokens: request.missing_tokens(),
            },
            transfer: TransferLine {
                full_bytes: all.full_bytes,
                full_bytes_a_rank: rank.full_bytes,
                delta_bytes: all.delta_bytes,
                delta_bytes_a_rank: rank.delta_bytes,
                saved_bytes,
                saved_share: saved_bytes as f64 / all.full_bytes as f64,
            },
            prefill_memory: MemoryLine::new(&shape, layout.prefill_tp, &request)?,
            recompute,
            links,
            warnings,
            model: ModelLine {
                name: model,
                cache: shape.cache(),
                dtype: shape.dtype().name(),
                token_bytes: shape.token_bytes(1)?,
                layers: shape.layers().to_vec(),
            },
        })
    }
}

impl RanksLine {
    fn new(shape: &Shape, tp: u64) -> Result<Self, ModelError> {
        Ok(Self {
            tp,
            copies: shape.copies(tp)?,
            token_bytes_a_rank: shape.token_bytes(tp)?,
        })
    }
}

impl MemoryLine {
    fn new(shape: &Shape, tp: u64, request: &Request) -> Result<Self, ModelError> {
        let rank = Sizes::a_rank(shape, tp, request)?;
        let all = Sizes::in_all(shape, tp, request)?;
        Ok(Self {
            held_bytes: all.full_bytes,
            held_bytes_a_rank: rank.full_bytes,
            early_release_bytes: all.kept_bytes,
            early_release_bytes_a_rank: rank.kept_bytes,
        })
    }
}

impl RecomputeLine {
    fn new(compute: &Compute, request: &Request, delta_bytes: u64, overhead: f64) -> Self {
        let Compute { speed, by, source } = compute;
        let (from, to) = (request.overlap_tokens(), request.prompt_tokens());
        let seconds = speed.seconds(from, to);
        let work = match speed {
            Speed::Rate(_) => None,
            Speed::Peaks { work, .. } => Some(work),
        };
        Self {
            by: by.clone(),
            source: *source,
            seconds,
            matrix_flops: work.map(|work| work.matrix_flops(request.missing_tokens())),
            attention_flops: work.map(|work| work.attention_flops(from, to)),
            equal_gbit_per_second: equal_gbit_per_second(delta_bytes, seconds, overhead),
        }
    }
}
