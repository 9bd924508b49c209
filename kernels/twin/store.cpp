#include "store.h"

#include <cstring>

namespace mflex::twin {

Store::Store(char* base, const Shape& shape) : base_(base), shape_(shape), banks_(shape.banks) {
  header().magic = kMagic;
  for (uint64_t i = 0; i < shape.banks; ++i) banks_[i].begin = kPage + i * shape.bank_bytes;
}

EntryHeader& Store::entry(uint64_t offset) const {
  return *reinterpret_cast<EntryHeader*>(base_ + offset);
}

void Store::make_entry(uint64_t offset, const HandOver& what, uint64_t version,
                       uint64_t transfers) {
  EntryHeader& made = entry(offset);
  const uint64_t chunk = chunk_bytes_for(what.bytes, transfers);
  std::memset(static_cast<void*>(&made), 0, data_offset(what.bytes, chunk));
  made.version = version;
  made.bytes = what.bytes;
  made.chunk_bytes = chunk;
  made.slab = what.slab;
  made.source = what.source;
  store(&made.state, kWriting);
}

Bank& Store::bank_for(uint64_t version) {
  if (version == 0) throw Refused("versions are above 0");
  const uint64_t newest = committed();
  Bank* chosen = nullptr;
  std::string kept;
  for (Bank& bank : banks_) {
    if (bank.version == version) return bank;
    if (bank.version < newest || bank.version == 0) {  // 0: free
      if (chosen == nullptr || bank.version < chosen->version) chosen = &bank;
    } else {
      kept += (kept.empty() ? "" : ", ") + std::to_string(bank.version);
    }
  }
  if (chosen == nullptr) {
    throw Refused("there is no bank for version " + std::to_string(version) +
                  ": the versions kept are " + kept + ", and the newest that is complete on all" +
                  " servers is " + std::to_string(newest));
  }
  return *chosen;
}

std::vector<uint64_t> Store::begin(uint64_t version, uint64_t source,
                                   const std::vector<std::pair<uint64_t, uint64_t>>& slabs) {
  Bank& bank = bank_for(version);
  const bool fresh = bank.version != version;
  uint64_t used = fresh ? 0 : bank.used;
  std::vector<uint64_t> offsets;
  for (const auto& [slab, bytes] : slabs) {
    if (!fresh && bank.entries.count(slab)) {
      throw Refused("slab " + std::to_string(slab) + " of version " + std::to_string(version) +
                    " has a writer already");
    }
    const uint64_t wanted = entry_bytes(bytes);
    if (bytes > shape_.bank_bytes || used + wanted > shape_.bank_bytes) {
      throw Refused("the arena is exhausted: slab " + std::to_string(slab) + " of version " +
                    std::to_string(version) + " takes " + std::to_string(wanted) +
                    " bytes, but of the " + std::to_string(shape_.bank_bytes) +
                    " bytes for a version " + std::to_string(shape_.bank_bytes - used) +
                    " are left; one that is started by hand needs a larger --bank-gb");
    }
    offsets.push_back(bank.begin + used);
    used += wanted;
  }
  if (fresh) {
    bank.entries.clear();
    bank.common.clear();
    bank.version = version;
    ++snapshots;
  }
  bank.used = used;
  for (size_t i = 0; i < slabs.size(); ++i) {
    bank.entries[slabs[i].first] = offsets[i];
    make_entry(offsets[i], {source, slabs[i].first, slabs[i].second, 0}, version, slabs.size());
  }
  return offsets;
}

void Store::set_common(uint64_t version, const std::string& common) {
  for (Bank& bank : banks_) {
    if (bank.version == version) bank.common = common;
  }
}

std::vector<Bank> Store::versions() const {
  std::vector<Bank> used;
  for (const Bank& bank : banks_) {
    if (bank.version != 0) used.push_back(bank);
  }
  return used;
}

void Store::adopt(uint64_t version) {
  for (Bank& bank : banks_) {
    if (bank.version == version) continue;
    bank.version = bank.used = 0;
    bank.entries.clear();
    bank.common.clear();
  }
  store(&header().committed, version);
}

std::vector<uint64_t> Store::hand_over(uint64_t serial, const std::vector<HandOver>& wanted) {
  if (!switches_.count(serial)) reclaim(serial);
  Switch& placed = switches_[serial];
  std::vector<uint64_t> offsets;
  for (const HandOver& what : wanted) {
    const auto [found, fresh] = placed.try_emplace({what.source, what.slab}, Placed{what, 0});
    if (!(found->second.wanted == what)) {
      throw Refused("workers disagree about slab " + std::to_string(what.slab) + " of switch " +
                    std::to_string(serial));
    }
    if (fresh) {
      const uint64_t offset = found->second.offset = find_room(what.bytes);
      if (offset != 0) {
        make_entry(offset, what, serial, 1 + under_way());
        room_[offset] = entry_bytes(what.bytes);
      }
      ++(offset != 0 ? handed_over : without_room);
    }
    offsets.push_back(found->second.offset);
  }
  return offsets;
}

void Store::reclaim(uint64_t serial) {
  for (auto s = switches_.begin(); s != switches_.end();) {
    const bool old = s->first + 3 <= serial;
    for (auto& [key, placed] : s->second) {
      if (placed.offset == 0) continue;
      if (old || load(&entry(placed.offset).taken) >= placed.wanted.readers) {
        room_.erase(placed.offset);
        placed.offset = 0;
      }
    }
    s = old ? switches_.erase(s) : std::next(s);
  }
}

uint64_t Store::find_room(uint64_t bytes) const {
  uint64_t at = kPage + shape_.banks * shape_.bank_bytes;
  const uint64_t end = at + shape_.room_bytes, wanted = entry_bytes(bytes);
  if (bytes > shape_.room_bytes) return 0;
  for (const auto& [offset, size] : room_) {
    if (at + wanted <= offset) return at;
    at = offset + size;
  }
  return at + wanted <= end ? at : 0;
}

uint64_t Store::under_way() const {
  uint64_t count = 0;
  for (const auto& taken : room_) count += load(&entry(taken.first).state) == kWriting;
  return count;
}

uint64_t Store::room_used() const {
  uint64_t used = 0;
  for (const auto& taken : room_) used += taken.second;
  return used;
}

void Store::lose(uint64_t source) {
  for (auto& [serial, placed] : switches_) {
    for (const auto& [key, p] : placed) {
      if (p.offset == 0 || p.wanted.source != source) continue;
      EntryHeader& lost = entry(p.offset);
      if (load(&lost.state) != kWriting) continue;
      store(&lost.state, kLost);
      // A reader takes a chunk of another version than its own for an error.
      uint64_t* flags = reinterpret_cast<uint64_t*>(base_ + p.offset + sizeof(EntryHeader));
      for (uint64_t i = 0; i < chunk_count(lost.bytes, lost.chunk_bytes); ++i) {
        if (load(&flags[i]) != serial) store(&flags[i], ~uint64_t{0});
      }
    }
  }
}

void Store::forget_hand_overs() {
  switches_.clear();
  room_.clear();
}

}  // namespace mflex::twin
