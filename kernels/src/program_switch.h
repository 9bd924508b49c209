// The part of the validator that follows slab states through a switch of plans.
//
// Each slab on each device has a version: the one from before this iteration's update, or the one
// after it. Early copies must be of the first and be updated by the joiner like everybody else's;
// copies that are handed over must be of the second and must not be updated again. A slab that is
// being sent is neither updated nor dropped before its receiver has made room for it. At the end
// every device has exactly what the next plan gives it, after the update.
//
// A device updates its own part of a sharded slab, and the parameters are gathered from all holders
// after that, once, in one order on all members of a group. Where a slab is cut anew, every device
// must make room for exactly the part that the next plan gives it, and have all of it, from devices
// that own it now, before it updates the slab.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "program.h"
#include "program_validate.h"

namespace mflex {

using Range = std::pair<int64_t, int64_t>;
using Key = std::pair<int64_t, int64_t>;  // device and slab, or a pair of devices

// What a message holds: a slab's state, or a part of it.
struct Content {
  int64_t slab;
  bool whole;
  Range part;

  static Content of(const Step& step) {
    return {step.slab(), !has_range(step.op), {step.start, step.stop}};
  }
  bool operator==(const Content& o) const {
    return slab == o.slab && whole == o.whole && (whole || part == o.part);
  }
};

inline std::string elements(const Range& part) {
  return "elements " + std::to_string(part.first) + " to " + std::to_string(part.second);
}

inline std::string named(const Content& content) {
  const std::string slab = "slab " + std::to_string(content.slab);
  return content.whole ? slab : elements(content.part) + " of " + slab;
}

// Parts of sharded slabs during the replay of a program.
class ShardReplay {
 public:
  ShardReplay(const mflex_validate_problem& p, Failure* fail);

  bool is_cut(int64_t slab) const { return p_.cut[slab] != 0; }
  bool scattered(int64_t slab) const { return p_.scattered[slab] != 0; }
  // Devices that own a part of a slab after it is cut anew, ascending.
  std::vector<int64_t> owners_after(int64_t slab) const;

  void check_message(int64_t device, const Step& step);
  void recut(int64_t device, const Step& step);
  void arrive(int64_t device, int64_t slab, const Range& piece);
  bool whole(int64_t device, int64_t slab);
  void gather(int64_t device, const Step& step, bool updated);
  void finish();

 private:
  using Owners = std::map<int64_t, Range>;
  bool changed(int64_t slab, int64_t device) const;

  const mflex_validate_problem& p_;
  Failure& fail_;
  std::map<int64_t, Owners> before_, after_;        // of slabs that are cut anew
  std::map<int64_t, std::vector<int64_t>> groups_;  // who gathers a slab
  std::set<Key> rooms_, done_;
  std::map<Key, std::vector<Range>> lacks_;  // parts that have not arrived
  std::map<Key, std::vector<Range>> asked_;  // parts that nobody has been asked for
  std::map<std::vector<int64_t>, std::vector<int64_t>> order_;  // slabs gathered in a group
  std::map<std::pair<int64_t, std::vector<int64_t>>, size_t> gathered_;  // by device and group
};

// Slab versions during the replay of a program.
class SwitchReplay {
 public:
  SwitchReplay(const mflex_validate_problem& p, Failure* fail);

  // For each slab, the devices that reduce its gradient: those of the plan, and early joiners.
  const std::vector<int64_t>& members(int64_t slab) const { return members_[slab]; }
  bool is_member(int64_t slab, int64_t device) const {
    return is_member_[device * p_.slabs + slab];
  }
  bool scattered(int64_t slab) const { return shards_.scattered(slab); }

  // Devices to be replayed again because they may wait for what was done; -1 for none.
  int64_t send(int64_t device, const Step& step);
  int64_t receive(int64_t device, const Step& step, bool late);
  void recut(int64_t device, const Step& step);
  void gather(int64_t device, const Step& step);
  // These are false if a state is still on its way.
  bool update(int64_t device, int64_t slab);
  bool drop(int64_t device, int64_t slab);
  bool here(int64_t device, int64_t slab);
  // The slab that a blocked device waits for, and what which devices must do for it.
  int64_t waits(int64_t device, std::map<int64_t, Step>* needed) const;
  void finish();

 private:
  enum Version : char { kNone, kOld, kNew };
  struct Wanted {
    Version version;
    int64_t source;
  };
  struct Sent {
    Content content;
    Version version;
  };

  Version& version(int64_t device, int64_t slab) { return version_[device * p_.slabs + slab]; }
  bool next_has(int64_t slab, int64_t device) const { return next_[device * p_.slabs + slab]; }
  void check(int64_t slab);
  void match(int64_t source, int64_t target);
  bool left(int64_t device, int64_t slab);
  int64_t woken(int64_t device);

  const mflex_validate_problem& p_;
  Failure& fail_;
  ShardReplay shards_;
  std::vector<Version> version_;        // [devices, slabs]
  std::vector<char> next_, is_member_;  // [devices, slabs]
  std::vector<std::vector<int64_t>> members_;
  // Sent states that nobody has taken yet, and receives that wait, by ordered pair of devices.
  std::map<Key, std::deque<Sent>> sent_;
  std::map<Key, std::deque<Content>> due_;
  // By device and slab: version and sender of what is on its way there, and what receivers have not
  // taken yet of what is on its way from there.
  std::map<Key, Wanted> wanted_;
  std::map<Key, std::vector<Step>> leaving_;
  std::map<int64_t, int64_t> waiting_;  // device -> slab that it waits for
};

}  // namespace mflex
