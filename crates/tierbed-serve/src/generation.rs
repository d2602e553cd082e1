//! What requests are answered from: one generation of the snapshot, and what is made of it.
//!
//! A batch takes it once, so that rows, ids and dense weights of an answer belong together.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tierbed_core::{Error, Result};
use tierbed_io::Folder;
use tierbed_snapshot::{Generation, PublishedIds, View};

use crate::answer::Refusal;
use crate::answering::FORMER_MAX;
use crate::features::{attached, resolve, Feature, ServedFeature};
use crate::known::Heads;
use crate::plans::Plans;
use crate::predictor::{Model, Predictor};
use crate::query::Source;
use crate::routes::Service;
use crate::shard_tag::ShardTag;

/// Generations whose parts are kept: those that lookups may still have, and one that comes.
const KEPT: usize = 3 + FORMER_MAX;

/// What a server makes of a generation.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) identity: Arc<str>,
    pub(crate) ids: Arc<PublishedIds>,
    pub(crate) features: Vec<Feature>,
    /// The features as they were told, where they were.
    told: Option<Vec<ServedFeature>>,
    pub(crate) plans: Plans,
    pub(crate) heads: Heads,
    pub(crate) model: Option<Arc<Model>>,
    /// Which part of a divided model it is, where it is one.
    pub(crate) shard: Option<ShardTag>,
    /// When its training step committed, in milliseconds since 1970, where that is known.
    pub(crate) committed_at_ms: Option<u64>,
}

/// What a generation hands on to the next one, which may not bring its own.
#[derive(Debug, Clone, Default)]
pub(crate) struct Carried {
    told: Option<Vec<ServedFeature>>,
    predictor: Option<Arc<dyn Predictor>>,
}

impl Parts {
    fn carried(&self) -> Carried {
        let predictor = self.model.as_ref().map(|model| Arc::clone(&model.predictor));
        Carried { told: self.told.clone(), predictor }
    }
}

/// The newest generations of a server.
#[derive(Debug)]
pub(crate) struct Generations {
    features: Option<Vec<ServedFeature>>,
    predictor: Option<Arc<dyn Predictor>>,
    /// Newest last.
    known: Mutex<Vec<Arc<Parts>>>,
}

impl Generations {
    pub(crate) fn new(
        features: Option<Vec<ServedFeature>>,
        predictor: Option<Arc<dyn Predictor>>,
    ) -> Self {
        Self { features, predictor, known: Mutex::default() }
    }

    /// Whether predictions are answered.
    pub(crate) fn predicts(&self) -> bool {
        self.predictor.is_some()
    }

    /// Returns what was made of `view`, if it was.
    fn known(&self, view: &View<'_>) -> Option<Arc<Parts>> {
        let known = self.lock();
        known.iter().rfind(|parts| parts.identity == *view.identity()).cloned()
    }

    /// Returns what was made of `view`, or makes it.
    ///
    /// # Errors
    /// `Invalid` for features that do not fit the tables, `Corruption` for attachments that cannot
    /// be read; those of the predictor.
    pub(crate) fn of(&self, view: &View<'_>) -> Result<Arc<Parts>> {
        if let Some(parts) = self.known(view) {
            return Ok(parts);
        }
        // Requests go on meanwhile: a model may take its time.
        let before = self.lock().last().cloned();
        let carried = match before {
            Some(before) => self.carried(view, &before.carried())?,
            None => Carried { told: self.told(view)?, predictor: self.predictor.clone() },
        };
        let parts = self.made(view, carried)?;
        let mut known = self.lock();
        if let Some(parts) = known.iter().find(|parts| parts.identity == *view.identity()) {
            return Ok(Arc::clone(parts));
        }
        if known.len() == KEPT {
            known.remove(0);
        }
        known.push(Arc::clone(&parts));
        Ok(parts)
    }

    /// Makes `parts` those of the newest generation.
    pub(crate) fn put(&self, parts: Arc<Parts>) {
        let mut known = self.lock();
        known.retain(|known| known.identity != parts.identity);
        if known.len() == KEPT {
            known.remove(0);
        }
        known.push(parts);
    }

    /// Forgets all generations but the one that answers.
    pub(crate) fn keep_only(&self, identity: &str) {
        self.lock().retain(|parts| *parts.identity == *identity);
    }

    fn told(&self, view: &View<'_>) -> Result<Option<Vec<ServedFeature>>> {
        match &self.features {
            Some(features) => Ok(Some(features.clone())),
            None => attached(view),
        }
    }

    /// Returns what `view` brings; what it does not bring goes on from the generation before.
    pub(crate) fn carried(&self, view: &View<'_>, before: &Carried) -> Result<Carried> {
        let told = self.told(view)?.or_else(|| before.told.clone());
        let going = before.predictor.as_ref().or(self.predictor.as_ref());
        let predictor = match &self.predictor {
            Some(first) => first.next(view)?.or_else(|| going.cloned()),
            None => None,
        };
        Ok(Carried { told, predictor })
    }

    /// Makes what `view` needs.
    pub(crate) fn made(&self, view: &View<'_>, carried: Carried) -> Result<Arc<Parts>> {
        let Carried { told, predictor } = carried;
        let model = predictor.map(|predictor| Model::new(view, predictor)).transpose()?;
        Ok(Arc::new(Parts {
            identity: Arc::clone(view.identity()),
            ids: view.ids()?,
            features: resolve(view, told.as_deref())?,
            told,
            plans: Plans::default(),
            heads: Heads::default(),
            model: model.map(Arc::new),
            shard: ShardTag::of(view)?,
            committed_at_ms: view.committed_at_ms()?,
        }))
    }

    /// Forgets what was made of a generation that answers nobody.
    pub(crate) fn forget(&self, identity: &str) {
        self.lock().retain(|parts| *parts.identity != *identity);
    }

    // Entries are whole after every statement.
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Parts>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A server, and the generation that it answers from.
#[derive(Debug)]
pub(crate) struct Serving<'a> {
    service: &'a Service,
    pub(crate) view: View<'a>,
    pub(crate) parts: Arc<Parts>,
}

impl Service {
    /// Returns what was made of the newest generation, for who tells of the server.
    pub(crate) fn newest(&self) -> Arc<Parts> {
        let Some(newest) = self.generations.lock().last().cloned() else {
            panic!("a server starts with a generation");
        };
        newest
    }

    /// Takes the generation that is wanted, or the one that answers now.
    ///
    /// # Errors
    /// 412 for one that does not answer, or no longer; as [`Generations::of`], where nobody had
    /// asked for it before.
    pub(crate) fn serving(
        &self,
        wanted: Option<&str>,
    ) -> std::result::Result<Serving<'_>, Refusal> {
        let Some(view) = self.view_of(wanted) else {
            return Err(Refusal::no_generation(wanted.unwrap_or_default()));
        };
        let parts = self.generations.of(&view)?;
        Ok(Serving { service: self, view, parts })
    }

    /// Takes the generation that is wanted, or the one that answers now, if somebody has asked for
    /// it before: making what it needs may take long.
    pub(crate) fn serving_known(&self, wanted: Option<&str>) -> Option<Serving<'_>> {
        let view = self.view_of(wanted)?;
        let parts = self.generations.known(&view)?;
        Some(Serving { service: self, view, parts })
    }

    fn view_of(&self, wanted: Option<&str>) -> Option<View<'static>> {
        if let Some(gateway) = &self.gateway {
            let view = gateway.view();
            return wanted.is_none_or(|wanted| **view.identity() == *wanted).then_some(view);
        }
        match wanted {
            None => Some(self.snapshot().shared_view()),
            Some(identity) => self.answering.view_of(identity),
        }
    }

    /// Answers from a delta from now on.
    ///
    /// # Errors
    /// Those of [`Snapshot::apply`](tierbed_snapshot::Snapshot::apply) and of [`Generations::of`].
    pub(crate) fn apply(&self, folder: Arc<dyn Folder>) -> Result<Generation> {
        let name = folder.path().map_or_else(|| "memory".into(), |path| path.display().to_string());
        let snapshot = self.snapshot();
        let before = snapshot.generation().number;
        let mut staged = None;
        let prepare = |view: &View<'_>| {
            staged = Some(Arc::clone(view.identity()));
            self.generations.of(view).map(drop)
        };
        let applied = snapshot.apply_with(folder, prepare);
        match &applied {
            Ok(now) if now.number > before => {
                self.metrics.deltas_applied.inc();
                self.activated(&self.newest());
                self.log.delta_applied(&name, now);
            }
            Ok(_) => {}
            Err(error) => {
                if let Some(identity) = staged {
                    self.generations.forget(&identity);
                }
                self.delta_refused(&name, error);
            }
        }
        applied
    }

    /// Notes that what `parts` were made of answers from now on.
    pub(crate) fn activated(&self, parts: &Parts) {
        self.life.activate(self.clock.now_us());
        self.answering.committed(parts.committed_at_ms);
    }

    /// Tells of a delta that does not answer.
    pub(crate) fn delta_refused(&self, name: &str, error: &Error) {
        self.metrics.deltas_refused.inc();
        self.faults.note("delta", &error.to_string());
        self.log.delta_refused(name, error);
    }
}

impl Serving<'_> {
    /// Returns the model of this generation.
    ///
    /// # Errors
    /// `Unsupported` where there is none.
    pub(crate) fn model(&self) -> Result<&Arc<Model>> {
        let model = self.parts.model.as_ref();
        model.ok_or_else(|| Error::unsupported("this server has no model"))
    }

    pub(crate) fn source(&self) -> Source<'_> {
        let Parts { ids, features, plans, heads, .. } = &*self.parts;
        Source { snapshot: &self.view, ids, features, plans, heads }
    }
}

impl Deref for Serving<'_> {
    type Target = Service;

    fn deref(&self) -> &Service {
        self.service
    }
}
