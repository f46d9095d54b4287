//! Which of a model's cache groups counts.

use serde::{Deserialize, Serialize};

use crate::wire::skipped::{Skipped, shown};

/// What kinds of cache groups a rank has announced so far.
///
/// A group is announced by the first block stored in it, so `MainOnly` may still become `Hybrid`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheGroups {
    /// None: the engine does not tell, or has stored nothing yet.
    #[default]
    Unknown,
    /// One, of full attention: what it holds of a prompt can be used.
    MainOnly,
    /// Several, or another kind: a prefix that is held in one may be unusable for want of another.
    Hybrid,
}

/// The one group whose blocks count: the first of full attention that was announced.
///
/// All groups name a block by the same hash, so that blocks of two groups could not be told apart.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Groups {
    seen: CacheGroups,
    anchor: Option<u32>,
    zero_is_other: bool,
}

impl Groups {
    pub(super) fn seen(&self) -> CacheGroups {
        self.seen
    }

    /// Learns from a store.
    pub(super) fn learn(&mut self, group: Option<u32>, kind: Option<&str>) {
        let Some(kind) = kind else {
            // The only group of a plain model has the number 0.
            if group.is_some_and(|group| group != self.anchor.unwrap_or(0)) {
                self.seen = CacheGroups::Hybrid;
            }
            return;
        };
        let is_main = matches!(is_main_attention(kind), Some(true));
        if let Some(group) = group {
            if is_main {
                self.anchor.get_or_insert(group);
            } else if group == 0 {
                self.zero_is_other = true;
            }
        }
        let is_anchor = is_main && group.is_none_or(|group| self.anchor == Some(group));
        self.seen = match self.seen {
            CacheGroups::Unknown | CacheGroups::MainOnly if is_anchor => CacheGroups::MainOnly,
            _ => CacheGroups::Hybrid,
        };
    }

    /// Whether an event of this group and kind counts.
    pub(super) fn check(&self, group: Option<u32>, kind: Option<&str>) -> Result<(), Skipped> {
        if let Some(kind) = kind {
            match is_main_attention(kind) {
                Some(true) => {}
                Some(false) => return Err(Skipped::OtherKind(kind.to_owned())),
                None => return Err(Skipped::UnknownKind(shown(kind))),
            }
        }
        let Some(group) = group else { return Ok(()) };
        let counts = match self.anchor {
            Some(anchor) => anchor == group,
            // Before any group is announced, events that name none or the first one are a plain model's.
            None => group == 0 && !self.zero_is_other,
        };
        counts.then_some(()).ok_or(Skipped::OtherGroup(group))
    }
}

/// `None`: a kind that vLLM 0.31 does not have.
fn is_main_attention(kind: &str) -> Option<bool> {
    match kind {
        "full_attention" | "mla_attention" | "sink_full_attention" => Some(true),
        "sliding_window"
        | "sliding_window_mla"
        | "mamba"
        | "chunked_local_attention"
        | "encoder_only_attention"
        | "cross_attention" => Some(false),
        _ => None,
    }
}
