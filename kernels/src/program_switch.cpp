// See program_switch.h.
#include "program_switch.h"

#include <cstdlib>

namespace mflex {
namespace {

// The parts of `wanted` that are not in `has`, ascending.
std::vector<Range> missing(const Range& wanted, const Range* has) {
  const auto [start, stop] = wanted;
  if (start >= stop) return {};
  if (!has || has->second <= start || stop <= has->first) return {wanted};
  std::vector<Range> found;
  if (start < has->first) found.emplace_back(start, has->first);
  if (has->second < stop) found.emplace_back(has->second, stop);
  return found;
}

const Range* find(const std::map<int64_t, Range>& owners, int64_t device) {
  const auto found = owners.find(device);
  return found == owners.end() ? nullptr : &found->second;
}

// Take `piece` out of the one of `parts` that contains it; false if none does.
bool take(std::vector<Range>* parts, const Range& piece) {
  const auto whole = std::find_if(parts->begin(), parts->end(), [&](const Range& p) {
    return p.first <= piece.first && piece.first < piece.second && piece.second <= p.second;
  });
  if (whole == parts->end()) return false;
  const Range old = *whole;
  parts->erase(whole);
  if (old.first < piece.first) parts->emplace_back(old.first, piece.first);
  if (piece.second < old.second) parts->emplace_back(piece.second, old.second);
  return true;
}

std::string part_of(const Range* part) {
  return part ? elements(*part) : "nothing";
}

}  // namespace

// ---- sharded slabs -----------------------------------------------------------------------------

ShardReplay::ShardReplay(const mflex_validate_problem& p, Failure* fail) : p_(p), fail_(*fail) {
  for (int64_t slab = 0; slab < p.slabs; ++slab) {
    if (scattered(slab)) {
      groups_[slab] = {p.next + p.next_offset[slab], p.next + p.next_offset[slab + 1]};
    }
    if (!is_cut(slab)) continue;
    const auto owners = [slab](const int64_t* offset, const int64_t* parts) {
      Owners found;
      for (int64_t i = offset[slab]; i < offset[slab + 1]; ++i) {
        found[parts[3 * i]] = {parts[3 * i + 1], parts[3 * i + 2]};
      }
      return found;
    };
    before_[slab] = owners(p.old_offset, p.old_part);
    after_[slab] = owners(p.new_offset, p.new_part);
    if (p.cut[slab] == 2) groups_[slab] = owners_after(slab);
  }
}

std::vector<int64_t> ShardReplay::owners_after(int64_t slab) const {
  std::vector<int64_t> found;
  for (const auto& [device, part] : after_.at(slab)) found.push_back(device);
  return found;
}

bool ShardReplay::changed(int64_t slab, int64_t device) const {
  const Range* after = find(after_.at(slab), device);
  const Range* before = find(before_.at(slab), device);
  return after && !(before && *before == *after);
}

// Sharded slabs travel in pieces, all others whole.
void ShardReplay::check_message(int64_t device, const Step& step) {
  const int64_t slab = step.slab();
  if (!has_range(step.op)) {
    if (is_cut(slab) || scattered(slab)) {
      fail_.stop("slab " + str(slab) + " is sharded: its state travels in pieces");
    }
    return;
  }
  if (!is_cut(slab)) {
    fail_.stop("slab " + str(slab) + " is not cut anew: no pieces of it travel");
  }
  const Range piece{step.start, step.stop};
  if (step.op == kSendPiece) {
    const Range* own = find(before_.at(slab), device);
    if (!own || piece.first >= piece.second || !missing(piece, own).empty()) {
      fail_.stop("device " + str(device) + " owns " + part_of(own) + " of slab " + str(slab) +
                 " before the update");
    }
    return;
  }
  const auto asked = asked_.find({device, slab});
  if (asked == asked_.end()) {
    fail_.stop("device " + str(device) + " has not made room for a new part of slab " + str(slab));
  }
  if (!take(&asked->second, piece)) {
    fail_.stop("device " + str(device) + " does not lack this piece of slab " + str(slab));
  }
}

// Room for another part.
void ShardReplay::recut(int64_t device, const Step& step) {
  const int64_t slab = step.slab();
  if (!is_cut(slab) || !changed(slab, device)) {
    fail_.stop("device " + str(device) + " keeps its part of slab " + str(slab));
  }
  const Key key{device, slab};
  if (rooms_.count(key)) fail_.stop("slab " + str(slab) + " is cut anew a second time");
  const Range room{step.start, step.stop}, part = after_.at(slab).at(device);
  if (room != part) {
    fail_.stop("wrong part: the next plan gives " + elements(part) + " of slab " + str(slab) +
               " to device " + str(device));
  }
  rooms_.insert(key);
  lacks_[key] = asked_[key] = missing(room, find(before_.at(slab), device));
}

// A piece that was asked for is there.
void ShardReplay::arrive(int64_t device, int64_t slab, const Range& piece) {
  take(&lacks_[{device, slab}], piece);
}

// Whether a device has its next part; false if pieces are on their way.
bool ShardReplay::whole(int64_t device, int64_t slab) {
  const Range* after = find(after_.at(slab), device);
  if (!after) {
    fail_.stop("device " + str(device) + " gives up its part of slab " + str(slab) +
               ": others update it");
  }
  const Key key{device, slab};
  if (changed(slab, device) && !rooms_.count(key)) {
    fail_.stop("device " + str(device) + " has not made room for its new part of slab " +
               str(slab) + ", " + elements(*after));
  }
  const auto asked = asked_.find(key);
  if (asked != asked_.end() && !asked->second.empty()) {
    fail_.stop("device " + str(device) + " lacks " + elements(asked->second.front()) + " of slab " +
               str(slab) + ", and has not asked for it");
  }
  const auto lacks = lacks_.find(key);
  return lacks == lacks_.end() || lacks->second.empty();
}

// Parameters are gathered; `updated`: this device's part is.
void ShardReplay::gather(int64_t device, const Step& step, bool updated) {
  const int64_t slab = step.slab();
  const auto found = groups_.find(slab);
  if (found == groups_.end()) {
    fail_.stop("slab " + str(slab) + " is not sharded after this iteration: nothing to gather");
  }
  const std::vector<int64_t>& group = found->second;
  const int64_t* offset = p_.group_offset + step.group();
  if (!std::equal(group.begin(), group.end(), p_.group + offset[0], p_.group + offset[1])) {
    fail_.stop("wrong group: slab " + str(slab) + " is held by devices " + names(group) + " then");
  }
  if (!updated) {
    fail_.stop("the parameters of slab " + str(slab) + " are gathered before its update");
  }
  if (!done_.insert({device, slab}).second) {
    fail_.stop("the parameters of slab " + str(slab) + " are gathered a second time");
  }
  const size_t number = gathered_[{device, group}]++;
  auto& order = order_[group];
  if (number == order.size()) {
    order.push_back(slab);
  } else if (order[number] != slab) {
    fail_.stop("out of order: other members of the group gather slab " + str(order[number]) +
               " at this place");
  }
}

// All parameters must be gathered.
void ShardReplay::finish() {
  for (const auto& [slab, group] : groups_) {
    for (const int64_t device : group) {
      if (!done_.count({device, slab})) {
        fail_.stop_at_end(device,
                          "the list ends without gathering the parameters of slab " + str(slab));
      }
    }
  }
}

// ---- versions ----------------------------------------------------------------------------------

SwitchReplay::SwitchReplay(const mflex_validate_problem& p, Failure* fail)
    : p_(p),
      fail_(*fail),
      shards_(p, fail),
      version_(p.devices * p.slabs, kNone),
      next_(p.devices * p.slabs),
      is_member_(p.devices * p.slabs),
      members_(p.slabs) {
  const Rows now{p.now_offset, p.now}, next{p.next_offset, p.next};
  const auto join = [&](int64_t device, int64_t slab) { is_member_[device * p.slabs + slab] = 1; };
  for (int64_t slab = 0; slab < p.slabs; ++slab) {
    for (auto d = now.begin(slab); d != now.end(slab); ++d) {
      version(*d, slab) = kOld;
      join(*d, slab);
    }
    for (auto d = next.begin(slab); d != next.end(slab); ++d) next_[*d * p.slabs + slab] = 1;
    if (!shards_.is_cut(slab)) continue;
    for (const int64_t device : shards_.owners_after(slab)) join(device, slab);
  }
  for (int64_t device = 0; device < p.devices; ++device) {
    Reader steps(p.words + p.word_offset[device], p.words + p.word_offset[device + 1]);
    while (!steps.done()) {
      const Step step = steps.take();
      if (step.op == kGlobalNorm) break;
      if (step.op == kRecvState && step.slab() < p.slabs) join(device, step.slab());
    }
  }
  for (int64_t device = 0; device < p.devices; ++device) {
    for (int64_t slab = 0; slab < p.slabs; ++slab) {
      if (is_member(slab, device)) members_[slab].push_back(device);
    }
  }
}

// A state leaves.
int64_t SwitchReplay::send(int64_t device, const Step& step) {
  check(step.slab());
  if (!here(device, step.slab())) {
    fail_.stop("device " + str(device) + " has no state of slab " + str(step.slab()) + " to send");
  }
  shards_.check_message(device, step);
  sent_[{device, step.peer()}].push_back({Content::of(step), version(device, step.slab())});
  leaving_[{device, step.slab()}].push_back(step);
  match(device, step.peer());
  return woken(step.peer());
}

// Room is made for a state, and its arrival is awaited by what uses it.
int64_t SwitchReplay::receive(int64_t device, const Step& step, bool late) {
  const int64_t slab = step.slab();
  check(slab);
  shards_.check_message(device, step);
  const Key key{device, slab};
  if (step.op == kRecvState) {
    if (version(device, slab) != kNone || wanted_.count(key)) {
      fail_.stop("device " + str(device) + " has slab " + str(slab) + " already");
    }
    if (!next_has(slab, device)) {
      fail_.stop("the next plan does not give slab " + str(slab) + " to device " + str(device));
    }
    wanted_[key] = {late ? kNew : kOld, step.peer()};
  }
  due_[{step.peer(), device}].push_back(Content::of(step));
  match(step.peer(), device);
  return woken(step.peer());
}

void SwitchReplay::recut(int64_t device, const Step& step) {
  check(step.slab());
  shards_.recut(device, step);
}

void SwitchReplay::gather(int64_t device, const Step& step) {
  shards_.gather(device, step, version(device, step.slab()) == kNew);
}

bool SwitchReplay::update(int64_t device, int64_t slab) {
  Version& own = version(device, slab);
  if (shards_.is_cut(slab)) {
    if (!shards_.whole(device, slab) || !left(device, slab)) {
      waiting_[device] = slab;
      return false;
    }
    if (own == kNone) own = kOld;
  }
  if (!here(device, slab) || !left(device, slab)) return false;
  if (own == kNew) {
    fail_.stop("slab " + str(slab) + " came to device " + str(device) +
               " after the update: it is updated twice");
  }
  own = kNew;
  return true;
}

bool SwitchReplay::drop(int64_t device, int64_t slab) {
  check(slab);
  if (version(device, slab) == kNone) {
    fail_.stop("device " + str(device) + " has no slab " + str(slab) + " to drop");
  }
  if (next_has(slab, device)) {
    fail_.stop("slab " + str(slab) + " is dropped, but the next plan gives it to device " +
               str(device));
  }
  if (!left(device, slab)) return false;
  version(device, slab) = kNone;
  return true;
}

// Whether a state is there; false if it is on its way, an error if it never comes.
bool SwitchReplay::here(int64_t device, int64_t slab) {
  if (version(device, slab) != kNone) return true;
  if (!wanted_.count({device, slab})) {
    fail_.stop("device " + str(device) + " does not have slab " + str(slab) +
               " (dropped, or not yet received)");
  }
  waiting_[device] = slab;
  return false;
}

int64_t SwitchReplay::waits(int64_t device, std::map<int64_t, Step>* needed) const {
  const int64_t slab = waiting_.at(device);
  const auto wanted = wanted_.find({device, slab});
  if (wanted != wanted_.end()) {
    (*needed)[wanted->second.source] = {kSendState, slab, device, 0, 0, 0};
    return slab;
  }
  for (const auto& [pair, due] : due_) {
    for (const Content& c : due) {
      if (pair.second != device || c.slab != slab || c.whole) continue;
      (*needed)[pair.first] = {kSendPiece, slab, device, 0, c.part.first, c.part.second};
    }
  }
  if (!needed->empty()) return slab;
  const auto leaving = leaving_.find({device, slab});
  if (leaving == leaving_.end()) return slab;
  for (const Step& sent : leaving->second) {
    const bool piece = sent.op == kSendPiece;
    (*needed)[sent.peer()] = {
        piece ? kRecvPiece : kRecvState, slab, device, 0, sent.start, sent.stop};
  }
  return slab;
}

// Every device must have what the next plan gives it, after the update, and no more.
void SwitchReplay::finish() {
  for (int64_t slab = 0; slab < p_.slabs; ++slab) {
    for (int64_t device = 0; device < p_.devices; ++device) {
      if (!next_has(slab, device)) continue;
      if (version(device, slab) == kNone) {
        const bool asked = wanted_.count({device, slab});
        fail_.stop_at_end(device, "at the end slab " + str(slab) +
                                      (asked ? " never arrives" : " is not there") +
                                      ", which the next plan needs");
      }
      if (version(device, slab) == kOld) {
        fail_.stop_at_end(device, "the list ends without an update of slab " + str(slab));
      }
    }
  }
  shards_.finish();
  for (int64_t device = 0; device < p_.devices; ++device) {
    for (int64_t slab = 0; slab < p_.slabs; ++slab) {
      if (version(device, slab) != kNone && !next_has(slab, device)) {
        fail_.stop_at_end(device,
                          "slab " + str(slab) + " is kept, but the next plan does not need it");
      }
    }
  }
  for (const auto& [pair, sent] : sent_) {
    if (sent.empty()) continue;
    fail_.stop_at_end(pair.first, "the state of " + named(sent.front().content) +
                                      " is sent to device " + str(pair.second) +
                                      ", which never receives it");
  }
}

void SwitchReplay::check(int64_t slab) {
  if (!p_.switches) fail_.stop("a switch in a program without a next plan");
  if (slab >= p_.slabs) fail_.stop("there are only slabs 0 to " + str(p_.slabs - 1));
}

// Deliver what was both sent and asked for: first in, first out, as on the wire.
void SwitchReplay::match(int64_t source, int64_t target) {
  auto& sent = sent_[{source, target}];
  auto& due = due_[{source, target}];
  while (!sent.empty() && !due.empty()) {
    const Sent first = sent.front();
    const Content wanted = due.front();
    sent.pop_front();
    due.pop_front();
    if (!(first.content == wanted)) {
      fail_.stop("out of order: device " + str(source) + " sends " + named(first.content) +
                 ", device " + str(target) + " expects " + named(wanted));
    }
    const int64_t slab = wanted.slab;
    Version expected = kOld;
    if (wanted.whole) {
      expected = wanted_.at({target, slab}).version;
      wanted_.erase({target, slab});
    }
    if (first.version != expected) {
      const auto when = [](Version v) {
        return v == kOld ? "before the update" : "after the update";
      };
      fail_.stop("stale state: " + named(wanted) + " is sent " + when(first.version) + ", device " +
                 str(target) + " takes it as it is " + when(expected));
    }
    if (wanted.whole) {
      version(target, slab) = first.version;
    } else {
      shards_.arrive(target, slab, wanted.part);
    }
    auto& leaving = leaving_[{source, slab}];
    leaving.erase(std::find_if(leaving.begin(), leaving.end(), [&](const Step& step) {
      return step.peer() == target && Content::of(step) == wanted;
    }));
  }
}

// Whether all copies of a slab that were sent from a device have been taken.
bool SwitchReplay::left(int64_t device, int64_t slab) {
  const auto found = leaving_.find({device, slab});
  if (found == leaving_.end() || found->second.empty()) return true;
  waiting_[device] = slab;
  return false;
}

// The device, if it was waiting.
int64_t SwitchReplay::woken(int64_t device) {
  return waiting_.erase(device) ? device : -1;
}

}  // namespace mflex
